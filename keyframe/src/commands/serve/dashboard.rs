//! The dashboard's options of `keyframe serve`, and the thread that serves it.

use crate::failure::Failure;
use keyframe_dashboard::{DashboardData, DashboardSources};
use keyframe_store_keys::KeyArg;
use keyframe_web::{DashboardOptions, DashboardServer, Error, LogFormat};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use zeroize::Zeroizing;

/// The default address.
const DEFAULT: &str = "127.0.0.1:7421";
/// The value for no dashboard.
const NONE: &str = "none";
/// Connections at the same time; more wait.
const CONNECTIONS_MAX: usize = 256;

/// Options of the dashboard.
#[derive(clap::Args, Debug)]
pub struct DashboardArgs {
    /// Where the dashboard is, or `none`
    /// [default: 127.0.0.1:7421, or another port if that is taken]
    #[arg(long, value_name = "HOST:PORT")]
    http: Option<String>,
    /// A recording to show, or a directory with some; may be repeated
    #[arg(long, value_name = "DIR")]
    recordings: Vec<PathBuf>,
    /// What `keyframe analyze --out` has made, or a directory with some; may be repeated
    #[arg(long, value_name = "DIR")]
    analysis: Vec<PathBuf>,
    /// Let who shows the token start VMs and clones from checkpoints by the dashboard, on this
    /// machine: then this process keeps all the rights that it was started with
    #[arg(long)]
    allow_start: bool,
    #[command(flatten)]
    key: KeyArg,
    /// How the dashboard writes its requests to standard error; json writes each, text only with
    /// --verbose
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log_format: Format,
    /// Tell each request to the dashboard
    #[arg(long, short)]
    verbose: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A line for a person.
    Text,
    /// A JSON object on each line.
    Json,
}

/// One that listens.
pub struct Dashboard {
    server: DashboardServer,
    served: Arc<DashboardData>,
}

impl DashboardArgs {
    /// Whether there is to be one.
    pub fn is_wanted(&self) -> bool {
        self.http.as_deref() != Some(NONE)
    }

    /// Whether VMs may be started.
    pub fn starts(&self) -> bool {
        self.allow_start
    }

    /// Listens. `store` is shown beside what running VMs write to.
    pub fn bind(
        &self,
        store: Option<&Path>,
        token: Option<&Zeroizing<Vec<u8>>>,
    ) -> Result<Option<Dashboard>, Failure> {
        if !self.is_wanted() {
            return Ok(None);
        }
        let listen = address(self.http.as_deref().unwrap_or(DEFAULT))?;
        let server = match self.bind_at(listen, token) {
            Err(error) if error.is_taken() && self.http.is_none() => {
                let other = self
                    .bind_at(SocketAddr::new(listen.ip(), 0), token)
                    .map_err(|e| failure(&e))?;
                eprintln!(
                    "keyframe: note: {listen} is taken, so the dashboard is at port {}; choose one with --http",
                    other.address().port()
                );
                other
            }
            bound => bound.map_err(|e| failure(&e))?,
        };
        if !server.address().ip().is_loopback() {
            eprintln!(
                "keyframe: warning: the dashboard is plain HTTP, and everyone on the network can see the token: put a proxy with TLS before it, \
                 or keep it at 127.0.0.1 and forward the port (ssh -L 7421:127.0.0.1:7421 HOST)"
            );
        }
        let served = Arc::new(DashboardData::new(DashboardSources {
            store: store.map(Into::into),
            key: self.key.clone(),
            recordings: self.recordings.clone(),
            analyses: self.analysis.clone(),
            starts: self.allow_start,
            store_fix: |error, store| Failure::store(error, store).fix,
        }));
        Ok(Some(Dashboard { server, served }))
    }

    fn bind_at(
        &self,
        listen: SocketAddr,
        token: Option<&Zeroizing<Vec<u8>>>,
    ) -> keyframe_web::Result<DashboardServer> {
        let log = match self.log_format {
            Format::Json => Some(LogFormat::Json),
            Format::Text => self.verbose.then_some(LogFormat::Text),
        };
        DashboardServer::bind(DashboardOptions {
            listen,
            token: token.cloned(),
            connections_max: CONNECTIONS_MAX,
            log,
        })
    }
}

impl Dashboard {
    /// Returns the address to open in a browser.
    pub fn url(&self) -> String {
        format!("http://{}/", self.server.address())
    }

    /// Serves it until `stop` is set.
    pub fn begin(self, stop: &Arc<AtomicBool>) -> Result<JoinHandle<Result<(), Failure>>, Failure> {
        let (stop, Self { server, served }) = (Arc::clone(stop), self);
        std::thread::Builder::new()
            .name("dashboard".into())
            .spawn(move || server.run(served, &stop).map_err(|e| failure(&e)))
            .map_err(|e| Failure::new(format!("start the dashboard's thread: {e}")))
    }
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    let bad = |e: String| {
        Failure::new(format!("show the dashboard at {text}: {e}"))
            .fix("name a host and a port: --http 127.0.0.1:7421; or --http none")
    };
    let mut found = text.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
    found.next().ok_or_else(|| bad("the name stands for no address".into()))
}

fn failure(error: &Error) -> Failure {
    Failure { fix: error.fix(), ..Failure::new(crate::failure::chain(error)) }
}
