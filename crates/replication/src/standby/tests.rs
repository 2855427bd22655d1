//! Single steps of a standby.
