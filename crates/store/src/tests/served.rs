//! The client against the server of `crates/serve`, over the loopback interface: the conformance
//! suite of backends (writes go to a directory), caches of nodes, and servers that end or are no
//! checkpoint servers.

use super::crash::script;
use super::{TINY, assert_image, layout, put_changes, run_beside, seal};
use crate::{CheckOptions, CheckpointId, Error, Store, Tuning};
use keyframe_serve::{Server, ServerIdentity, ServerOptions, ServerReport};
use keyframe_store_backend::testing::conformance::pattern;
use keyframe_store_backend::testing::{check_backend, check_encrypted_backend};
use keyframe_store_backend::{
    AppendFile, Backend, LocalBackend, LockGuard, ReadFile, Result, ServedBackend,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use zeroize::Zeroizing;

const SECRET: &str = "a secret of the test's";

/// A server of a store in this process; it ends when it is dropped.
pub struct Running {
    pub address: SocketAddr,
    fingerprint: String,
    server: Arc<Server>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<ServerReport>>,
}

impl Running {
    fn new(store: &Path) -> Self {
        Self::at(store, "127.0.0.1:0".parse().unwrap(), ServerIdentity::fresh().unwrap())
    }

    fn at(store: &Path, listen: SocketAddr, identity: ServerIdentity) -> Self {
        Self::with(store, listen, identity, None)
    }

    /// Also accepts checkpoints, if there is a lease for writers.
    pub fn with(
        store: &Path,
        listen: SocketAddr,
        identity: ServerIdentity,
        writers_lease: Option<Duration>,
    ) -> Self {
        let token = Some(Zeroizing::new(SECRET.as_bytes().to_vec()));
        let options = ServerOptions { listen, token, identity, connections_max: 64, writers_lease };
        let server = Arc::new(Server::bind(store, options).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let (running, until) = (server.clone(), stop.clone());
        let thread = std::thread::spawn(move || running.run(&until).unwrap());
        let fingerprint = server.fingerprint();
        Self { address: server.address(), fingerprint, server, stop, thread: Some(thread) }
    }

    fn end(&mut self) -> ServerReport {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }

    fn sent(&self) -> u64 {
        self.server.report().bytes_sent
    }

    /// As a process of the node whose cache is in that directory sees it.
    pub fn client(&self, cache: &Path) -> ServedBackend {
        client(self.address, &self.fingerprint, SECRET, cache)
    }

    pub fn store(&self, cache: &Path) -> Store {
        Store::open_on(Arc::new(self.client(cache)), Path::new("kf://test")).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn client(address: SocketAddr, fingerprint: &str, token: &str, cache: &Path) -> ServedBackend {
    let url = format!("kf://{address}?fingerprint={fingerprint}");
    let cache = cache.display().to_string();
    ServedBackend::open_in(Path::new(&url), &|name| match name {
        "KEYFRAME_TOKEN" => Some(token.to_owned()),
        "KEYFRAME_CACHE" => Some(cache.clone()),
        _ => None,
    })
    .unwrap()
}

/// Writes where the store is, reads through its server.
#[derive(Debug)]
struct Mixed {
    local: LocalBackend,
    served: ServedBackend,
}

/// A file that asks for its length each time: a process that writes and reads maps nothing between.
#[derive(Debug)]
struct Fresh(Arc<dyn ReadFile>, ServedBackend);

impl ReadFile for Fresh {
    fn len_bytes(&self) -> Result<u64> {
        self.1.expect_changes();
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.0.read_at(offset, buffer)
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        self.0.prefetch(ranges);
    }
}

impl Backend for Mixed {
    fn describe(&self, name: &str) -> String {
        self.served.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.local.lock(holder)
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.local.lock_prune(holder)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        self.served.lock_holder()
    }

    fn is_pruning(&self) -> Result<bool> {
        self.served.is_pruning()
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        self.local.create(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.local.put(name, bytes)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        Ok(Arc::new(Fresh(self.served.open(name)?, self.served.clone())))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.served.list(folder)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.local.remove(name)
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.local.sync(name)
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        self.served.read(name, len_bytes_max)
    }
}

pub fn init(dir: &Path) -> PathBuf {
    let place = dir.join("store");
    Store::init(&place).unwrap();
    place
}

#[test]
fn a_served_store_conforms_with_one_cache_for_all_readers() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let running = Running::new(&place);
    let cache = dir.path().join("cache");
    let open = || -> Arc<dyn Backend> {
        Arc::new(Mixed { local: LocalBackend::open(&place), served: running.client(&cache) })
    };
    check_backend(&open);
    check_encrypted_backend(&open);
}

/// Checkpoints of one run, each with its image.
fn fill(place: &Path) -> Vec<(CheckpointId, Vec<u64>)> {
    let store = Store::open(place).unwrap();
    let mut writer =
        store.lock_writer_tuned("test", Tuning { pack_bytes_max: 3 << 20, ..TINY }).unwrap();
    let pages = 6000_u64;
    let mut run = writer.begin_run("vm", &layout(pages)).unwrap();
    let (mut old, mut known) = (vec![0; pages as usize], Vec::new());
    for epoch in 0..4_u64 {
        // Noise for the most part; a twentieth changes.
        let image = (0..pages).map(|page| match page % 20 {
            19 => 0,
            n if n == epoch => 2 * (page * 10 + epoch) + 1001,
            _ => 2 * page * 10 + 1001,
        });
        let image: Vec<u64> = image.collect();
        put_changes(&mut run, &old, &image).unwrap();
        known.push((seal(&mut run, pages).unwrap().id, image.clone()));
        old = image;
    }
    run.finish().unwrap();
    known
}

#[test]
fn a_node_fetches_what_differs_and_in_few_requests() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let known = fill(&place);
    let mut running = Running::new(&place);
    let cache = dir.path().join("cache");
    let ram_bytes = 6000 * 4096;
    let mut sent = Vec::new();
    for (id, image) in &known {
        let before = running.sent();
        assert_image(&running.store(&cache), *id, image);
        sent.push(running.sent() - before);
    }
    assert!(sent[0] > ram_bytes / 2, "{sent:?}: there was more to send");
    assert!(sent[1..].iter().all(|sent| *sent < ram_bytes * 15 / 100), "{sent:?}");
    // All of it again, by another process of the node: hashes and looks.
    let before = running.server.report();
    for (id, image) in &known {
        assert_image(&running.store(&cache), *id, image);
    }
    let report = running.end();
    assert!(report.bytes_sent - before.bytes_sent < 20_000, "{report:?} {before:?}");
    assert!(report.requests < 1500, "a request for each page? {report:?}");
    assert_eq!(report.refused, 0);
}

#[test]
fn readers_follow_a_run_and_what_a_prune_changes() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let running = Running::new(&place);
    let cache = dir.path().join("cache");
    let reader = running.store(&cache);
    let images = &script(12)[0];
    let store = Store::open(&place).unwrap();
    let ids = run_beside(&store, &reader, images);
    let held = reader.load(ids[4]).unwrap();
    store.forget(&ids[..3].iter().copied().collect()).unwrap();
    let options = crate::PruneOptions { max_unused: 0.0, ..crate::PruneOptions::default() };
    store.prune(&options, &mut |_| {}).unwrap();
    for reader in [running.store(&cache), reader] {
        for (id, image) in ids.iter().zip(images).skip(3) {
            assert_image(&reader, *id, image);
        }
        let report = reader.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
        assert!(report.is_clean(), "{report:#?}");
    }
    // Loaded before: the packs that were removed are open at the server.
    let mut pages = 0;
    let all = keyframe_units::PageRange::new(keyframe_units::PageIndex(0), images[4].len() as u64);
    held.read_pages(all, &mut |page, content| {
        assert!(*content == super::content(images[4][page.0 as usize]), "page {}", page.0);
        pages += 1;
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(pages, images[4].iter().filter(|n| **n != 0).count());
}

/// The same name, the same length, other bytes: after a crash of the writer, or where a store was
/// put in another's place.
#[test]
fn a_file_that_was_replaced_is_not_taken_for_what_the_cache_has() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let running = Running::new(&place);
    let cache = dir.path().join("cache");
    let pack = place.join("packs/00000001.pack");
    for round in 0..3_u8 {
        let bytes = pattern(700_000, round);
        if round == 1 {
            std::fs::remove_file(&pack).unwrap();
        }
        std::fs::write(&pack, &bytes).unwrap();
        let read = running.client(&cache).read("packs/00000001.pack", 1 << 20).unwrap();
        assert!(read == bytes, "round {round}");
    }
    // Cut, as a crash does, and gone on with.
    let sent = running.sent();
    let bytes = [&pattern(700_000, 2)[..400_000], &pattern(500_000, 9)].concat();
    std::fs::write(&pack, &bytes).unwrap();
    assert!(running.client(&cache).read("packs/00000001.pack", 1 << 20).unwrap() == bytes);
    let again = running.sent() - sent;
    assert!(
        (500_000..700_000).contains(&again),
        "{again} bytes sent: what is the same was sent again"
    );
}

#[test]
fn reads_continue_after_a_server_restarts_and_fail_if_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let known = fill(&place);
    let running = Running::new(&place);
    let cache = dir.path().join("cache");
    let mut served = running.client(&cache);
    served.hasten(Duration::from_millis(400));
    let store = Store::open_on(Arc::new(served), Path::new("kf://test")).unwrap();
    let (id, image) = &known[0];
    let loaded = store.load(*id).unwrap();
    let all = keyframe_units::PageRange::new(keyframe_units::PageIndex(0), image.len() as u64);
    let (mut pages, address, mut running) = (0, running.address, Some(running));
    let read = loaded.read_pages(all, &mut |_, _| {
        pages += 1;
        if pages == 1000 {
            running.take();
        }
        Ok::<_, Error>(())
    });
    let error = read.unwrap_err();
    let fix = error.fix().unwrap_or_default();
    assert!(error.to_string().contains("no answer from the checkpoint server"), "{error}");
    assert!(fix.contains("keyframe serve"), "{fix}");
    // A client that expects another server is refused.
    let again = Running::at(&place, address, ServerIdentity::fresh().unwrap());
    let error = loaded.read_page(keyframe_units::PageIndex(5990)).unwrap_err();
    assert!(error.to_string().contains("another server"), "{error}");
    let renewed = again.store(&cache);
    let sent = again.sent();
    assert_image(&renewed, *id, image);
    let (rest, whole) = (again.sent() - sent, image.len() as u64 * 4096 * 19 / 20);
    assert!(rest < whole * 9 / 10, "{rest} of {whole} bytes sent: what had come was sent again");
}

#[test]
fn a_client_without_a_token_learns_nothing_and_gets_a_fix() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let mut running = Running::new(&place);
    let refused = |served: ServedBackend, words: &[&str]| {
        let error = served.read("store.json", 1 << 16).unwrap_err();
        let text = format!("{error}; {}", error.fix().unwrap_or_default());
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert!(!text.contains(SECRET), "{text}");
    };
    let at = |token: &str, print: &str| client(running.address, print, token, dir.path());
    refused(at("guessed", &running.fingerprint), &["the token is not the one", "KEYFRAME_TOKEN"]);
    refused(at("", &running.fingerprint), &["the token is not the one", "KEYFRAME_TOKEN_FILE"]);
    refused(
        at(SECRET, &"ab".repeat(32)),
        &["another server", &running.fingerprint, "KEYFRAME_SERVE_FINGERPRINT"],
    );
    let report = running.end();
    assert_eq!(report.refused, 2, "{report:?}");
    assert_eq!(report.requests, 2, "no answer but the two refusals: {report:?}");
}

#[test]
fn nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let running = Running::new(&place);
    let served = running.client(dir.path());
    let refusals = [
        served.put("tags/a", b"x").unwrap_err(),
        served.remove("store.json").unwrap_err(),
        served.create("packs/00000001.pack").unwrap_err(),
        served.lock("me").unwrap_err(),
        served.lock_prune("me").unwrap_err(),
        served.sync("store.json").unwrap_err(),
        keyframe_store_backend::create(Path::new("kf://127.0.0.1")).unwrap_err(),
    ];
    for error in refusals {
        assert!(error.to_string().contains("read-only"), "{error}");
        assert!(error.fix().unwrap().contains("where the store is"), "{error}");
    }
    assert!(served.read("store.json", 1 << 16).is_ok());
    assert_eq!(served.unlock(&|_| true).unwrap(), keyframe_store_backend::UnlockOutcome::Nothing);
}

/// No name leads out of the store.
#[test]
fn no_name_leads_out_of_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    std::fs::write(dir.path().join("outside"), "not of the store").unwrap();
    std::fs::write(place.join("tmp/x"), "neither").unwrap();
    std::os::unix::fs::symlink(dir.path(), place.join("tags/..x")).unwrap();
    let running = Running::new(&place);
    let served = running.client(&dir.path().join("cache"));
    for name in [
        "../outside",
        "tags/../../outside",
        "tmp/x",
        "lock",
        "/etc/passwd",
        "tags/..x/outside",
        "packs",
        "",
    ] {
        for error in [served.read(name, 1 << 20).unwrap_err(), served.open(name).unwrap_err()] {
            assert!(
                error.to_string().contains("no name that a store's file has"),
                "{name}: {error}"
            );
        }
    }
    for folder in ["..", "tmp", "/", "disks"] {
        assert!(served.list_unchecked(folder).is_err(), "{folder}");
    }
}

/// What listens there is no checkpoint server, or a broken one.
#[test]
fn a_client_of_a_broken_server_ends_with_an_error_in_bounded_time() {
    let dir = tempfile::tempdir().unwrap();
    for (what, expected) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "speaks no TLS"),
        (b"", "no answer"),
        (b"\x16\x03\x03\xff\xff", "no TLS"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answering = std::thread::spawn(move || {
            // Each attempt of the client.
            for stream in listener.incoming().take(8) {
                let mut stream = stream.unwrap();
                let mut greeting = [0; 5];
                if stream.read_exact(&mut greeting).is_err() {
                    return;
                }
                let _ = stream.write_all(what);
            }
        });
        let began = std::time::Instant::now();
        let mut served = client(address, &"ab".repeat(32), "", dir.path());
        // Short only where nothing ever comes, which is waited for in vain.
        let patience = Duration::from_millis(if what.is_empty() { 300 } else { 5000 });
        served.hasten(patience);
        let error = served.read("store.json", 100).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(began.elapsed() < Duration::from_mins(2));
        // Lets the thread go on to its end.
        for _ in 0..8 {
            let _ = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100));
        }
        drop(answering);
    }
}

#[test]
fn several_threads_and_processes_fetch_a_piece_once_each() {
    let dir = tempfile::tempdir().unwrap();
    let place = init(dir.path());
    let bytes = pattern(3 << 20, 5);
    std::fs::write(place.join("packs/00000001.pack"), &bytes).unwrap();
    let running = Running::new(&place);
    let served = running.client(&dir.path().join("cache"));
    let file = served.open("packs/00000001.pack").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6_usize {
            let (file, bytes) = (&file, &bytes);
            scope.spawn(move || {
                for step in 0..40 {
                    let at = (thread * 31 + step * 77_777) % (bytes.len() - 5000);
                    let mut part = vec![0; 5000];
                    file.read_at(at as u64, &mut part).unwrap();
                    assert!(part == bytes[at..at + 5000]);
                }
            });
        }
    });
    // Two may see at the same moment that one is missing, now and then.
    assert!(running.sent() < (3 << 20) + (768 << 10), "{} bytes sent", running.sent());
}
