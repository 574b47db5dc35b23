//! The memory server: pinned page pools, one for each client.
