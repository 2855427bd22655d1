//! An S3 server for one test: SeaweedFS on free ports of the loopback interface, with a directory
//! of its own.
//!
//! It supports conditional puts, uploads in parts and paged listings as Amazon's does. After a kill
//! it still has everything that it confirmed.

use keyframe_testing::{Scope, record_skip};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The name of the bucket that the server has.
pub const BUCKET: &str = "keyframe-test";
/// The access key and the secret key that the server accepts.
pub const KEY: (&str, &str) = ("test-key", "test-secret");
const CONFIG: &str = r#"{"identities":[{"name":"test","credentials":[{"accessKey":"test-key","secretKey":"test-secret"}],
    "actions":["Admin","Read","Write","List"]}]}"#;
const START_MAX: Duration = Duration::from_mins(2);

/// A running S3 server for tests. Dropping it kills it.
pub struct S3Server {
    dir: tempfile::TempDir,
    weed: PathBuf,
    /// The ports of master, volume, filer and S3: each one for HTTP and one for gRPC.
    ports: [u16; 8],
    child: Option<Child>,
}

impl S3Server {
    /// Starts a server. If its program is missing, counts the running test as skipped and returns
    /// `None`.
    pub fn start() -> Option<Self> {
        let Some(weed) = binary() else {
            record_skip(Scope::Test, "no S3 server (guests/build s3server installs one)");
            return None;
        };
        let dir = tempfile::Builder::new()
            .prefix("keyframe-s3-")
            .tempdir()
            .expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), CONFIG).expect("write the configuration");
        std::fs::create_dir(dir.path().join("data")).expect("make the directory for data");
        let listeners: Vec<_> =
            (0..8).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
        let ports: Vec<u16> =
            listeners.iter().map(|l| l.local_addr().expect("its address").port()).collect();
        drop(listeners);
        let ports = ports.try_into().expect("eight ports");
        let mut server = Self { dir, weed, ports, child: None };
        server.resume();
        server.make_bucket();
        Some(server)
    }

    /// Returns the server's URL, `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[6])
    }

    /// Kills the server, as a power failure would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for (name, port) in ["master", "volume", "filer", "s3"].iter().zip([1, 3, 5, 7]) {
            let _ = std::fs::remove_file(format!(
                "/tmp/seaweedfs-{name}-grpc-{}.sock",
                self.ports[port]
            ));
        }
    }

    /// Starts the server again on its files, and waits until it answers.
    pub fn resume(&mut self) {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let names = ["master", "volume", "filer", "s3"];
        let mut command = Command::new(&self.weed);
        command.args([
            "-logtostderr",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            "-s3.iam=false",
        ]);
        command.args([
            "-master.telemetry=false",
            "-master.electionTimeout=500ms",
            "-master.volumeSizeLimitMB=64",
        ]);
        command.args([
            "-volume.max=30",
            "-volume.minFreeSpace=0",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]);
        for (name, pair) in names.iter().zip(self.ports.chunks(2)) {
            command
                .arg(format!("-{name}.port={}", pair[0]))
                .arg(format!("-{name}.port.grpc={}", pair[1]));
        }
        command
            .arg(format!("-dir={}", path("data")))
            .arg(format!("-s3.config={}", path("config.json")));
        command
            .arg(format!("-filer.localSocket={}", path("f")))
            .arg(format!("-s3.localSocket={}", path("s")));
        let log =
            std::fs::File::options().create(true).append(true).open(self.dir.path().join("log"));
        let child = command
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("its log"))
            .spawn();
        self.child = Some(child.expect("start the S3 server"));
        let began = Instant::now();
        // The server answers before it can store. It needs the filer to answer for a missing
        // bucket.
        while !matches!(self.ask(6, "GET", "/no-such-bucket/x"), Some(403 | 404))
            || self.ask(4, "GET", "/").is_none()
        {
            assert!(began.elapsed() < START_MAX, "no answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn make_bucket(&self) {
        let began = Instant::now();
        while !matches!(self.ask(4, "POST", &format!("/buckets/{BUCKET}/")), Some(200..300)) {
            assert!(began.elapsed() < START_MAX, "no bucket: {}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The HTTP status with which one of its ports answers.
    fn ask(&self, port: usize, method: &str, path: &str) -> Option<u16> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.ports[port])).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let request =
            format!("{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = Vec::new();
        stream.take(4096).read_to_end(&mut answer).ok()?;
        String::from_utf8_lossy(&answer).split(' ').nth(1)?.parse().ok()
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().rev().take(10).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The program: `KEYFRAME_S3_SERVER`, or the one that `guests/build s3server` names.
fn binary() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("KEYFRAME_S3_SERVER") {
        return Some(path.into());
    }
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script =
        manifest.ancestors().map(|dir| dir.join("guests/build")).find(|script| script.is_file())?;
    let output = Command::new(script).arg("s3server").output().ok()?;
    let dir = String::from_utf8_lossy(&output.stdout).lines().last().map(PathBuf::from)?;
    Some(dir.join("bin/weed")).filter(|weed| weed.is_file())
}
