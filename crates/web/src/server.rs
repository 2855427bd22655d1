//! The HTTP server: listens, limits connections, and ends on request.

use crate::api::{self, App};
use crate::event_hub::EventHub;
use crate::guard::AccessGuard;
use crate::{DashboardSource, Error, LogFormat, Result};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

/// Time between two looks at the stop flag.
const LOOK: Duration = Duration::from_millis(100);
/// The longest time for a request's head, and for an idle connection.
const HEAD_MAX: Duration = Duration::from_secs(20);
/// The longest head of a request, in bytes.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Threads for blocking calls of the source.
const BLOCKING_MAX: usize = 8;
/// The longest time for open requests when the server ends.
const END_MAX: Duration = Duration::from_secs(2);

/// The options of the dashboard's server.
#[derive(Debug)]
pub struct DashboardOptions {
    /// The address to listen at; with port 0 the system chooses a free port.
    pub listen: SocketAddr,
    /// The token for changes, and for reading from other hosts; `None` for no token.
    pub token: Option<Zeroizing<Vec<u8>>>,
    /// The largest number of connections at a time; others wait.
    pub connections_max: usize,
    /// The format of the request log; `None` for no log.
    pub log: Option<LogFormat>,
}

/// A dashboard's server that listens.
pub struct DashboardServer {
    listener: TcpListener,
    address: SocketAddr,
    options: DashboardOptions,
}

impl DashboardServer {
    /// Begins to listen at the address in `options`.
    ///
    /// Errors: [`Error::NoToken`] without a token at an address that other hosts can reach;
    /// [`Error::Io`] if the server cannot listen.
    pub fn bind(options: DashboardOptions) -> Result<Self> {
        let listen = options.listen;
        if !listen.ip().is_loopback() && options.token.is_none() {
            return Err(Error::NoToken(listen));
        }
        let failed = |source| Error::Io { object: listen.to_string(), operation: "listen", source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, options })
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves the data of `source` until `stop` is set.
    ///
    /// Error: [`Error::Io`] if the server cannot start.
    pub fn run(self, source: Arc<dyn DashboardSource>, stop: &AtomicBool) -> Result<()> {
        let failed = |operation| {
            let object = self.address.to_string();
            move |source| Error::Io { object, operation, source }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(BLOCKING_MAX)
            .thread_name("dashboard")
            .enable_all()
            .build()
            .map_err(failed("start its threads"))?;
        let guard = AccessGuard::new(self.address.ip(), self.options.token.as_ref());
        let live = EventHub::default();
        let app = Arc::new(App::new(source, guard, live, self.options.log));
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(failed("listen"))?
        };
        let connections = Arc::new(Semaphore::new(self.options.connections_max.max(1)));
        runtime.spawn(accept(listener, Arc::clone(&app), connections));
        runtime.spawn(api::send_changes(app));
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
        }
        runtime.shutdown_timeout(END_MAX);
        Ok(())
    }
}

async fn accept(listener: tokio::net::TcpListener, app: Arc<App>, connections: Arc<Semaphore>) {
    let router = api::router(&app);
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        let Ok((socket, peer)) = listener.accept().await else {
            // Out of descriptors, or the client has gone: the other connections continue.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let service = TowerToHyperService::new(api::with_peer(router.clone(), peer));
        tokio::spawn(async move {
            let _permit = permit;
            // Errors of a client do not concern the server.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_MAX)
                .max_buf_size(HEAD_BYTES_MAX)
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}
