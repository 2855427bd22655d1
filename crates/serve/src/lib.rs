//! The checkpoint server: a store on this machine, read by others over the network.
//!
//! ```text
//!   accept ─▶ a thread for each connection: TLS ─▶ greeting with the token ─▶ request ─▶ answer ─▶ request ─▶ ...
//!                                                                              └─▶ Files: names that a store has ─▶ Backend
//! ```
//!
//! It sends what the store's files hold, as they hold it: packs are compressed already, and what is
//! encrypted stays so; the server needs no key. What it is asked for is described in
//! `docs/formats/serve.md`, and read in `keyframe_store_backend::served`.
//!
//! Invariants: nothing is written; nobody without the token learns anything; no name leads out of
//! the store; connections, the length of requests, the memory for answers and each wait are
//! bounded.

mod connection;
mod error;
mod files;
mod identity;
mod server;
#[cfg(test)]
mod tests;

pub use error::{Error, Result};
pub use identity::Identity;
pub use server::{Options, Report, Server};
