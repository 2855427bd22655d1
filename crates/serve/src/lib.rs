//! The checkpoint server: a store on this machine, read by others over the network.
//!
//! ```text
//!   accept ─▶ a thread for each connection: TLS ─▶ greeting with the token ─▶ request ─▶ answer ─▶ request ─▶ ...
//!                                                                              └─▶ Files: names that a store has ─▶ Backend
//! ```
//!
//! The server sends the bytes of the store's files unchanged. Packs are compressed already, and
//! encrypted files stay encrypted, so the server needs no key. `docs/formats/serve.md` describes
//! the requests, and `keyframe_store_backend::served` parses them.
//!
//! Invariants: the server writes nothing. A client without the token learns nothing. No name leads
//! out of the store. Connections, the length of requests, the memory for answers and each wait are
//! bounded.

mod connection;
mod error;
mod files;
mod identity;
mod server;
#[cfg(test)]
mod tests;

pub use error::{Error, Result};
pub use identity::ServerIdentity;
pub use server::{Server, ServerOptions, ServerReport};
