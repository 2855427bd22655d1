//! `keyframe serve`: a store, for other machines to read and to write to; and the dashboard, for people.

mod dashboard;

use crate::failure::{DONE, Failure, Outcome, USAGE};
use crate::output;
use dashboard::DashboardArgs;
use keyframe_serve::{Server, ServerIdentity, ServerOptions, ServerReport};
use keyframe_store::backend::served::{TOKEN_VARIABLE, read_token};
use serde::Serialize;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zeroize::Zeroizing;

/// Show the dashboard, and serve a store to other machines
#[derive(clap::Args, Debug)]
#[command(
    after_help = "At its start the server prints the two things that clients need: its address, which they give in place of a store, and the
fingerprint by which they recognise it. Clients keep what they read ($KEYFRAME_CACHE, else ~/.cache/keyframe; up to
KEYFRAME_CACHE_BYTES), so a second checkpoint costs only what differs. A run may write to the store meanwhile.

Clients on other machines need a token, from --token-file or KEYFRAME_TOKEN. All traffic is encrypted, with a certificate that
the server makes at its first start and keeps, or with --tls-cert and --tls-key (then KEYFRAME_SERVE_CA names the authority on
the client's side). The server ends at Ctrl-C or SIGTERM. It needs no key to serve an encrypted store; its clients do.

With --allow-write, all who have the token can also add checkpoints: run, attach, record, copy --to and import take the address in
place of a store, many at a time, beside those that write to the directory on this host. Each deduplicates against all. A writer
whose host is cut off or stopped for longer than --writer-lease loses its place, and others go on without it; it begins anew when
it comes back. Forget, prune, tag and repair on this host, with the directory. A client can remove no checkpoint of another one.

The dashboard is a page for the browser. It shows all running VMs with their checkpoints as they come, the checkpoints of STORE and
of the stores that the VMs write to, recordings and analyses. Without STORE only the dashboard is served. Its API is at /api/v1
(described in /api/v1/openapi.json), its metrics for Prometheus at /metrics. Reading needs no token on the loopback, and needs one
elsewhere. Changes always need one: pinning, tagging, rolling a VM back and, with --allow-start, starting VMs and clones. The
dashboard needs a key to show the checkpoints of an encrypted store.

Examples:
  keyframe serve                                                      # the dashboard of all running VMs
  keyframe serve S --recordings RECS --analysis OUT
  ssh -L 7421:127.0.0.1:7421 HOST                                     # then open http://127.0.0.1:7421/ here
  (umask 077; head -c 24 /dev/urandom | base64 > TOKEN)
  keyframe serve S --listen 0.0.0.0:7420 --token-file TOKEN
  export KEYFRAME_TOKEN_FILE=TOKEN KEYFRAME_SERVE_FINGERPRINT=...     # on a node, with what serve said
  keyframe restore --store kf://head:7420 latest --lazy
  keyframe serve S --allow-write --listen 0.0.0.0:7420 --token-file TOKEN     # one store for all hosts
  keyframe run --store kf://head:7420 --interval 1s -- qemu-system-x86_64 ... # on each of them"
)]
pub struct Serve {
    /// The store's directory, or s3://BUCKET/PREFIX
    #[arg(env = "KEYFRAME_STORE", value_name = "STORE")]
    store: Option<PathBuf>,
    /// Where to listen for clients that read the store; port 0 for any
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7420")]
    listen: String,
    /// A file with the token that clients have to show [env: KEYFRAME_TOKEN, the token itself]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The certificate to show, as PEM, followed by its chain
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Connections at the same time, at most
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,
    /// Accept checkpoints from clients that show the token; STORE must be a directory
    #[arg(long, requires = "store")]
    allow_write: bool,
    /// The time without a sign of a writing client after which others go on without it
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..=3600))]
    writer_lease: u64,
    /// Print JSON lines: the address at the start, the bytes sent at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    dashboard: DashboardArgs,
}

/// The data that clients need: address and fingerprint.
#[derive(Serialize)]
struct Listening {
    /// Absent without a store, as is the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    needs_token: bool,
    /// Clients can add checkpoints.
    allows_write: bool,
    /// The dashboard.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<String>,
}

/// The time between two checks for the end, if only the dashboard runs.
const LOOK: Duration = Duration::from_millis(100);

impl Serve {
    /// Whether it may have to start programs.
    pub fn starts(&self) -> bool {
        self.dashboard.starts()
    }

    /// Serves until a signal comes.
    pub fn run(&self) -> Outcome {
        let stop = keyframe_session::interrupt::interruption()?;
        let token = self.token()?;
        let needs_token = token.is_some();
        let dashboard = self.dashboard.bind(self.store.as_deref(), token.as_ref())?;
        let http = dashboard.as_ref().map(dashboard::Dashboard::url);
        let served = self.store.as_deref().map(|store| self.bind(store, token)).transpose()?;
        if served.is_none() && dashboard.is_none() {
            let failure = Failure::new("there is nothing to serve: no STORE, and no dashboard");
            return Err(Failure {
                code: USAGE,
                ..failure.fix("name a store, or leave out --http none")
            });
        }
        let listening = Listening {
            url: served.as_ref().map(|served| format!("kf://{}", served.server.address())),
            fingerprint: served.as_ref().map(|served| served.server.fingerprint()),
            needs_token,
            allows_write: self.allow_write,
            http,
        };
        self.tell(&listening, served.as_ref())?;
        let shown = dashboard.map(|dashboard| dashboard.begin(&stop)).transpose()?;
        let report = match &served {
            Some(served) => Some(served.server.run(&stop).map_err(|e| failure(&e, served.store))),
            None => wait(&stop, shown.as_ref()),
        };
        stop.store(true, Ordering::Relaxed);
        if let Some(shown) = shown {
            shown.join().map_err(|_| Failure::new("the dashboard's thread panicked"))??;
        }
        if let Some(report) = report.transpose()? {
            self.tell_end(&report)?;
        }
        Ok(DONE)
    }

    fn bind<'a>(
        &self,
        store: &'a Path,
        token: Option<Zeroizing<Vec<u8>>>,
    ) -> Result<OfStore<'a>, Failure> {
        let identity = self.identity(store)?;
        let is_own = identity.is_own;
        let listen = self.address()?;
        let options = ServerOptions {
            listen,
            token,
            identity,
            connections_max: self.connections as usize,
            writers_lease: self.allow_write.then(|| Duration::from_secs(self.writer_lease)),
        };
        let server = Server::bind(store, options).map_err(|e| failure(&e, store))?;
        Ok(OfStore { server, store, is_own })
    }

    fn token(&self) -> Result<Option<Zeroizing<Vec<u8>>>, Failure> {
        if let Some(file) = &self.token_file {
            return Ok(Some(read_token(file).map_err(|e| Failure::store(&e.into(), file))?));
        }
        let token = std::env::var(TOKEN_VARIABLE).ok().map(Zeroizing::new);
        let token = token.map(|token| Zeroizing::new(token.trim().as_bytes().to_vec()));
        Ok(token.filter(|token| !token.is_empty()))
    }

    fn identity(&self, store: &Path) -> Result<ServerIdentity, Failure> {
        let made = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => ServerIdentity::of_files(certificate, key),
            _ => match keyframe_store::state_folder() {
                Some(folder) => ServerIdentity::kept(&folder.join("serve")),
                None => ServerIdentity::fresh(),
            },
        };
        made.map_err(|e| failure(&e, store))
    }

    fn address(&self) -> Result<SocketAddr, Failure> {
        let bad = |e: String| {
            Failure::new(format!("listen at {}: {e}", self.listen))
                .fix("name a host and a port: --listen 127.0.0.1:7420")
        };
        let mut found = self.listen.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
        found.next().ok_or_else(|| bad("the name stands for no address".into()))
    }

    fn tell(&self, listening: &Listening, served: Option<&OfStore<'_>>) -> Result<(), Failure> {
        if served.is_some() && !listening.needs_token {
            eprintln!(
                "keyframe: warning: without a token every user of this machine can read the memory of the VMs; see --token-file"
            );
        }
        if self.json {
            return line(listening);
        }
        if let (Some(served), Some(url), Some(fingerprint)) =
            (served, &listening.url, &listening.fingerprint)
        {
            output::print_line(&format!("serving {} at {url}", served.store.display()))?;
            let known = if served.is_own { "" } else { " (or KEYFRAME_SERVE_CA=FILE)" };
            output::print_line(&format!(
                "clients set KEYFRAME_SERVE_FINGERPRINT={fingerprint}{known}"
            ))?;
            if listening.needs_token {
                output::print_line("and KEYFRAME_TOKEN, or KEYFRAME_TOKEN_FILE")?;
            }
            if listening.allows_write {
                output::print_line("clients can add checkpoints")?;
            }
        }
        match &listening.http {
            Some(url) => output::print_line(&format!("dashboard at {url}")),
            None => Ok(()),
        }
    }

    fn tell_end(&self, report: &ServerReport) -> Result<(), Failure> {
        if self.json {
            return line(report);
        }
        let ServerReport { bytes_sent, requests, connections, refused } = *report;
        output::print_line(&format!(
            "{} sent for {requests} requests on {connections} connections ({refused} refused)",
            output::bytes(bytes_sent)
        ))
    }
}

/// A store that is served.
struct OfStore<'a> {
    server: Server,
    store: &'a Path,
    is_own: bool,
}

/// Waits until it is to end, or the dashboard has.
fn wait<T>(
    stop: &AtomicBool,
    shown: Option<&std::thread::JoinHandle<T>>,
) -> Option<Result<ServerReport, Failure>> {
    while !stop.load(Ordering::Relaxed) && shown.is_some_and(|shown| !shown.is_finished()) {
        std::thread::sleep(LOOK);
    }
    None
}

fn failure(error: &keyframe_serve::Error, store: &Path) -> Failure {
    if let keyframe_serve::Error::Store(error) = error {
        return Failure::store(error, store);
    }
    let failure = Failure::new(crate::failure::chain(error));
    Failure { fix: error.fix(), ..failure }
}

fn line<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text =
        serde_json::to_string(value).map_err(|e| Failure::new(format!("write JSON: {e}")))?;
    output::print_line(&text)
}
