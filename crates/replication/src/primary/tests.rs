//! Single steps of a primary.
