//! The server: it listens, bounds what each connection may do, and ends when it is told to.

use crate::api::{self, App};
use crate::guard::Guard;
use crate::live::Live;
use crate::{Error, LogFormat, Result, Source};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

/// How often it looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);
/// A request's head comes, and a connection that is kept is used again, in that time.
const HEAD_MAX: Duration = Duration::from_secs(20);
/// Bytes of a request's head, and of what is read ahead.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Threads that may block in a source.
const BLOCKING_MAX: usize = 8;
/// What is under way gets so long when it ends.
const END_MAX: Duration = Duration::from_secs(2);

/// How the dashboard is served.
#[derive(Debug)]
pub struct Options {
    /// Where to listen; port 0 for any.
    pub listen: SocketAddr,
    /// What has to be shown to change something, and off the loopback to read.
    pub token: Option<Zeroizing<Vec<u8>>>,
    /// More connections wait.
    pub connections_max: usize,
    /// Where requests are told.
    pub log: Option<LogFormat>,
}

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    options: Options,
}

impl Server {
    /// Listens. Refuses to be reached from other machines without a token.
    pub fn bind(options: Options) -> Result<Self> {
        let listen = options.listen;
        if !listen.ip().is_loopback() && options.token.is_none() {
            return Err(Error::Open(listen));
        }
        let failed = |source| Error::Io { object: listen.to_string(), operation: "listen", source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, options })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves what `source` says until `stop` is set.
    pub fn run(self, source: Arc<dyn Source>, stop: &AtomicBool) -> Result<()> {
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
        let guard = Guard::new(self.address.ip(), self.options.token.as_ref());
        let live = Live::default();
        let app = Arc::new(App::new(source, guard, live, self.options.log));
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(failed("listen"))?
        };
        let connections = Arc::new(Semaphore::new(self.options.connections_max.max(1)));
        runtime.spawn(accept(listener, Arc::clone(&app), connections));
        runtime.spawn(api::watch(app));
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
            // No more descriptors, or a connection that went again: neither ends the others.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let service = TowerToHyperService::new(api::with_peer(router.clone(), peer));
        tokio::spawn(async move {
            let _permit = permit;
            // How a client ends is its own affair.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_MAX)
                .max_buf_size(HEAD_BYTES_MAX)
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}
