//! The checkpoint server: a store on this machine, for others to read and, if its user allows that, to
//! write to.
//!
//! ```text
//!   accept ─▶ a thread for each connection: TLS ─▶ greeting with the token ─▶ request ─▶ answer ─▶ request ─▶ ...
//!                                                                              └─▶ files: names that a store has ─▶ Backend
//!                                                                              └─▶ remote_writers: places under leases ─▶ Backend
//! ```
//!
//! The server sends the bytes of the store's files unchanged. Packs are compressed already, and
//! encrypted files stay encrypted, so the server needs no key. `docs/formats/serve.md` describes
//! the requests, and `keyframe_store_backend::served` parses them.
//!
//! Invariants: the server writes only for remote writers that have a place, and only what
//! [`write_rules`] allow. A client without the token learns nothing. No name leads
//! out of the store. Connections, the length of requests, the memory for answers and each wait are
//! bounded.

mod connection;
mod error;
mod files;
mod identity;
mod remote_session;
mod remote_writers;
mod server;
#[cfg(test)]
mod tests;
mod write_rules;

pub use error::{Error, Result};
pub use files::{Refusal, Reply, ServedFiles};
pub use identity::ServerIdentity;
pub use remote_writers::{RemoteWriterOptions, RemoteWriters};
pub use server::{Server, ServerOptions, ServerReport};
