//! Nodes that fetch checkpoints over their links: Slurm in network namespaces, and `keyframe
//! serve`.
//!
//! ```text
//!   server: slurmctld, the store of the recording, keyframe serve, keyframe analyze --on slurm
//!      │ links of one rate
//!   node n: a pilot with the cache DIR/caches/nN; what it fetched is in DIR/fetched/nN.json
//! ```

use super::WAIT;
use crate::interrupt::Interrupt;
use crate::keyframe_json::{KeyframeJson, RunningCommand};
use crate::{Error, Options};
use keyframe_kernel::cpu_time::process_cpu_time;
use keyframe_test_hosts::{Rate, SERVER_ADDRESS, SlurmCluster};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A cache that is too small to be of use: it holds less than a piece of a checkpoint.
const NO_CACHE_BYTES: &str = "1048576";

/// What a node receives when it starts at a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// All of the checkpoint, each time: the node's cache is too small to help.
    Whole,
    /// The parts that the node has not received before. Its cache is empty at first.
    Missing,
    /// The same, with a cache that has the parts of an earlier analysis.
    Cached,
}

impl Delivery {
    /// Returns its name in keys.
    pub fn key(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Missing => "missing",
            Self::Cached => "cached",
        }
    }
}

/// A cluster whose nodes can read the store of one recording.
pub struct NodeCluster<'a> {
    options: &'a Options,
    dir: PathBuf,
    cluster: SlurmCluster,
    interrupt: Interrupt,
}

/// An analysis on nodes.
pub struct NodeAnalysis {
    /// The report of `analyze --json`.
    pub report: Value,
    /// The bytes that all nodes received.
    pub fetched_bytes: f64,
    /// The processor time of the `keyframe serve` from which the nodes fetched, in nanoseconds; NaN
    /// if it ended before.
    pub serve_cpu_ns: f64,
}

/// The options of an analysis on nodes.
pub struct NodeRequest<'a> {
    /// The directory of the recording.
    pub recording: &'a Path,
    pub nodes: u64,
    pub delivery: Delivery,
    /// How many times its recorded time each interval takes.
    pub factor: u64,
    /// The recording may still be made.
    pub follow: bool,
    /// The directory for the results; it must not exist.
    pub out: &'a Path,
}

impl<'a> NodeCluster<'a> {
    /// Starts a cluster of `nodes` nodes whose links carry `rate`, with its files in `dir`.
    pub fn start(options: &'a Options, dir: &Path, nodes: u32, rate: Rate) -> Result<Self, Error> {
        // The hosts end with this process only if it cleans up.
        let interrupt = Interrupt::listen()?;
        let cluster = SlurmCluster::start(&dir.join("slurm"), nodes, rate)
            .map_err(Error::io("start a Slurm cluster in network namespaces"))?;
        let made = Self { options, dir: dir.into(), cluster, interrupt };
        made.write_worker()?;
        Ok(made)
    }

    /// Writes the program of the pilots: keyframe, with a cache for each node.
    fn write_worker(&self) -> Result<(), Error> {
        for part in ["caches", "fetched"] {
            let path = self.dir.join(part);
            fs::create_dir_all(&path).map_err(Error::io(format!("make {}", path.display())))?;
        }
        let text = format!(
            "#!/bin/sh\n\
             export KEYFRAME_CACHE='{dir}/caches'/\"$SLURMD_NODENAME\"\n\
             export KEYFRAME_FETCHED='{dir}/fetched'/\"$SLURMD_NODENAME\".json\n\
             exec '{keyframe}' \"$@\"\n",
            dir = self.dir.display(),
            keyframe = self.options.keyframe.display(),
        );
        let path = self.worker();
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .map_err(Error::io(format!("write {}", path.display())))
    }

    fn worker(&self) -> PathBuf {
        self.dir.join("worker")
    }

    /// Analyses a recording on the nodes, which fetch its checkpoints from a `keyframe serve` that
    /// runs meanwhile.
    pub fn analyse(&self, request: &NodeRequest<'_>) -> Result<NodeAnalysis, Error> {
        self.prepare_caches(request.delivery)?;
        let server = StoreServer::start(self, &request.recording.join("store"))?;
        let nodes = request.nodes.to_string();
        let mut command = Command::new(&self.options.keyframe);
        let factor = format!("factor={}", request.factor);
        command.arg("analyze").arg(request.recording);
        command.args(["--tool", WAIT, "--tool-arg", &factor]);
        command.arg("--out").arg(request.out).args(["--json", "--quiet", "--on", "slurm:main"]);
        command.args(["--nodes", &nodes, "--store", &server.url, "--worker"]).arg(self.worker());
        if request.follow {
            command.arg("--follow");
        }
        command.env("KEYFRAME_TOKEN", TOKEN).env("KEYFRAME_SERVE_FINGERPRINT", &server.fingerprint);
        command.env("KEYFRAME_CACHE", self.dir.join("caches/server"));
        if request.delivery == Delivery::Whole {
            command.env("KEYFRAME_CACHE_BYTES", NO_CACHE_BYTES);
        }
        let name = "keyframe analyze --on slurm".to_owned();
        let running = RunningCommand::start(name, self.cluster.on_server(&command))?;
        let report = running.wait(&self.interrupt)?;
        let serve_cpu = process_cpu_time(server.child.id());
        let serve_cpu_ns = serve_cpu.map_or(f64::NAN, |time| time.as_nanos() as f64);
        Ok(NodeAnalysis { report, fetched_bytes: self.fetched_bytes()?, serve_cpu_ns })
    }

    /// Returns the means to run commands of `keyframe` beside the cluster.
    pub fn keyframe(&self) -> KeyframeJson<'_> {
        KeyframeJson { options: self.options, interrupt: &self.interrupt }
    }

    fn prepare_caches(&self, delivery: Delivery) -> Result<(), Error> {
        let parts: &[&str] =
            if delivery == Delivery::Cached { &["fetched"] } else { &["fetched", "caches"] };
        for part in parts {
            let path = self.dir.join(part);
            fs::remove_dir_all(&path)
                .and_then(|()| fs::create_dir_all(&path))
                .map_err(Error::io(format!("empty {}", path.display())))?;
        }
        Ok(())
    }

    /// Returns the bytes that the nodes' processes received.
    fn fetched_bytes(&self) -> Result<f64, Error> {
        let path = self.dir.join("fetched");
        let failed = || format!("read {}", path.display());
        let mut bytes = 0.0;
        for entry in fs::read_dir(&path).map_err(Error::io(failed()))?.flatten() {
            let text = fs::read_to_string(entry.path()).map_err(Error::io(failed()))?;
            for line in text.lines() {
                let fetched: Value =
                    serde_json::from_str(line).map_err(|e| Error::failed(failed(), e))?;
                bytes += fetched["bytes_fetched"].as_f64().unwrap_or(f64::NAN);
            }
        }
        Ok(bytes)
    }
}

/// The token of the server, which only the nodes' network can reach.
const TOKEN: &str = "the token of this benchmark";

/// A `keyframe serve` on the cluster's server. Dropping it ends it.
struct StoreServer {
    child: Child,
    url: String,
    fingerprint: String,
}

impl StoreServer {
    fn start(of: &NodeCluster<'_>, store: &Path) -> Result<Self, Error> {
        let mut command = Command::new(&of.options.keyframe);
        command.arg("serve").arg(store);
        command.args(["--listen", &format!("{SERVER_ADDRESS}:0"), "--json"]);
        command.env("KEYFRAME_TOKEN", TOKEN).env("XDG_STATE_HOME", of.dir.join("state"));
        let log_path = of.dir.join("serve.log");
        let log = fs::File::create(&log_path)
            .map_err(Error::io(format!("make {}", log_path.display())))?;
        let mut child = of
            .cluster
            .on_server(&command)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(Error::io("run keyframe serve"))?;
        let mut line = String::new();
        let output = child.stdout.take();
        let read = output.map(|output| BufReader::new(output).read_line(&mut line));
        let mut server = Self { child, url: String::new(), fingerprint: String::new() };
        read.transpose().map_err(Error::io("read the output of keyframe serve"))?;
        let listening: Value = serde_json::from_str(&line).map_err(|_| {
            let text = fs::read_to_string(&log_path).unwrap_or_default();
            Error::failed("start keyframe serve", text.trim())
        })?;
        let text = |key: &str| listening[key].as_str().unwrap_or_default().to_owned();
        (server.url, server.fingerprint) = (text("url"), text("fingerprint"));
        Ok(server)
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
