//! `keyframe serve`: a store, for other machines to read.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use keyframe_serve::{Identity, Options, Report, Server};
use keyframe_store::backend::served::{TOKEN, read_token};
use serde::Serialize;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zeroize::Zeroizing;

/// Serve a store to other machines, which read checkpoints from it and keep what they have read
#[derive(clap::Args, Debug)]
#[command(
    after_help = "What it says when it begins is what the others need: an address that stands wherever a store does, and the fingerprint by
which they know this server. They keep what they read ($KEYFRAME_CACHE, else ~/.cache/keyframe; KEYFRAME_CACHE_BYTES of it),
so that a second checkpoint costs what differs. A run may go on in the store that is served.

To be reached from other machines it takes a token, from --token-file or KEYFRAME_TOKEN. All is encrypted: with a
certificate that is made at the first start and kept, or with --tls-cert and --tls-key (then KEYFRAME_SERVE_CA names, on the other
side, what that stands on). Ends at Ctrl-C or SIGTERM. Of an encrypted store it needs no key; those who read do.

Examples:
  (umask 077; head -c 24 /dev/urandom | base64 > TOKEN)
  keyframe serve S --listen 0.0.0.0:7420 --token-file TOKEN
  export KEYFRAME_TOKEN_FILE=TOKEN KEYFRAME_SERVE_FINGERPRINT=...     # on a node, with what serve said
  keyframe restore --store kf://head:7420 latest --lazy"
)]
pub struct Serve {
    /// The store's directory, or s3://BUCKET/PREFIX
    #[arg(env = "KEYFRAME_STORE", value_name = "STORE")]
    store: PathBuf,
    /// Where to listen; port 0 for any
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7420")]
    listen: String,
    /// A file with the token that clients have to show [env: KEYFRAME_TOKEN, the token itself]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The certificate to show, as PEM, with those that it stands on behind it
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Connections at the same time, at most
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,
    /// Print JSON, a line each: where it listens, and at its end what it has sent
    #[arg(long)]
    json: bool,
}

/// What clients have to know.
#[derive(Serialize)]
struct Listening {
    url: String,
    fingerprint: String,
    needs_token: bool,
}

impl Serve {
    /// Serves until a signal comes.
    pub fn run(&self) -> Outcome {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop))
                .map_err(|e| Failure::new(format!("catch signal {signal}: {e}")))?;
        }
        let token = self.token()?;
        let needs_token = token.is_some();
        let identity = self.identity()?;
        let is_own = identity.is_own;
        let listen = self.address()?;
        let options = Options { listen, token, identity, connections_max: self.connections as usize };
        let server = Server::bind(&self.store, options).map_err(|e| self.failure(&e))?;
        let fingerprint = server.fingerprint();
        let listening = Listening { url: format!("kf://{}", server.address()), fingerprint, needs_token };
        self.tell(&listening, is_own)?;
        let report = server.run(&stop).map_err(|e| self.failure(&e))?;
        self.tell_end(&report)?;
        Ok(DONE)
    }

    fn token(&self) -> Result<Option<Zeroizing<Vec<u8>>>, Failure> {
        if let Some(file) = &self.token_file {
            return Ok(Some(read_token(file).map_err(|e| Failure::store(&e, file))?));
        }
        let token = std::env::var(TOKEN).ok().map(Zeroizing::new);
        let token = token.map(|token| Zeroizing::new(token.trim().as_bytes().to_vec()));
        Ok(token.filter(|token| !token.is_empty()))
    }

    fn identity(&self) -> Result<Identity, Failure> {
        let made = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Identity::of_files(certificate, key),
            _ => match keyframe_store::state_folder() {
                Some(folder) => Identity::kept(&folder.join("serve")),
                None => Identity::fresh(),
            },
        };
        made.map_err(|e| self.failure(&e))
    }

    fn address(&self) -> Result<SocketAddr, Failure> {
        let bad = |e: String| {
            Failure::new(format!("listen at {}: {e}", self.listen))
                .fix("name a host and a port: --listen 127.0.0.1:7420")
        };
        let mut found = self.listen.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
        found.next().ok_or_else(|| bad("the name stands for no address".into()))
    }

    fn tell(&self, listening: &Listening, is_own: bool) -> Result<(), Failure> {
        if !listening.needs_token {
            eprintln!(
                "keyframe: warning: without a token every user of this machine can read the memory of the VMs; see --token-file"
            );
        }
        if self.json {
            return line(listening);
        }
        output::print_line(&format!("serving {} at {}", self.store.display(), listening.url))?;
        let known = if is_own { "" } else { " (or KEYFRAME_SERVE_CA=FILE)" };
        output::print_line(&format!(
            "clients set KEYFRAME_SERVE_FINGERPRINT={}{known}",
            listening.fingerprint
        ))?;
        if listening.needs_token {
            output::print_line("and KEYFRAME_TOKEN, or KEYFRAME_TOKEN_FILE")?;
        }
        Ok(())
    }

    fn tell_end(&self, report: &Report) -> Result<(), Failure> {
        if self.json {
            return line(report);
        }
        let Report { bytes_sent, requests, connections, refused } = *report;
        output::print_line(&format!(
            "{} sent for {requests} requests on {connections} connections ({refused} refused)",
            output::bytes(bytes_sent)
        ))
    }

    fn failure(&self, error: &keyframe_serve::Error) -> Failure {
        if let keyframe_serve::Error::Store(error) = error {
            return Failure::store(error, &self.store);
        }
        let failure = Failure::new(crate::failure::chain(error));
        Failure { fix: error.fix(), ..failure }
    }
}

fn line<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|e| Failure::new(format!("write JSON: {e}")))?;
    output::print_line(&text)
}
