//! The guest laboratory: builds guest images, boots guests, runs jobs in them.
