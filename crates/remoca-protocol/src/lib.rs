//! The wire protocol between a VM process and a memory server.
