//! Runs the databases that `keyframe-bench store` compares with, each through its own library. Each
//! database has one file.
//!
//! ```text
//!   keyframe-bench-peers --list     prints the databases of this build, as JSON
//!   keyframe-bench-peers JOB        runs a job (keyframe-bench-feed) and prints its result, as JSON
//! ```
//!
//! The databases have their default settings, except as their files say. A checkpoint is made durable
//! once, at its end. A library with a C interface of a dozen functions, and without a maintained crate
//! that builds in seconds, is bound by hand.

mod dedup_zstd;
#[cfg(has_kyoto)]
mod kyoto;
#[cfg(has_leveldb)]
mod leveldb;
#[cfg(has_lmdb)]
mod lmdb;
mod redb;
#[cfg(has_rocksdb)]
mod rocksdb;
mod sqlite;

use keyframe_bench_feed::{Error, Job, KeyedStore, Result, Store};

const ALL: &[&str] = &[
    #[cfg(has_kyoto)]
    "kyoto",
    #[cfg(has_lmdb)]
    "lmdb",
    #[cfg(has_rocksdb)]
    "rocksdb",
    #[cfg(has_leveldb)]
    "leveldb",
    "sqlite",
    "redb",
    "dedup_zstd",
];

fn main() -> std::process::ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("--list") => println!("{}", serde_json::json!({ "has": ALL })),
        Some(job) => match run(job) {
            Ok(line) => println!("{line}"),
            Err(e) => {
                eprintln!("{e}");
                return std::process::ExitCode::FAILURE;
            }
        },
        None => {
            eprintln!("keyframe-bench store runs this program; run: keyframe-bench store");
            return std::process::ExitCode::from(2);
        }
    }
    std::process::ExitCode::SUCCESS
}

fn run(job: &str) -> Result<String> {
    let job = Job::parse(job)?;
    let measured = match job.store.as_str() {
        "dedup_zstd" => dedup_zstd::count(&job)?,
        name => keyframe_bench_feed::run(&job, store(name)?.as_ref())?,
    };
    serde_json::to_string(&measured).map_err(|e| Error::failed("write what was measured", e))
}

fn store(name: &str) -> Result<Box<dyn Store>> {
    Ok(match name {
        #[cfg(has_kyoto)]
        "kyoto" => Box::new(KeyedStore::<kyoto::Kyoto>::new()),
        #[cfg(has_lmdb)]
        "lmdb" => Box::new(KeyedStore::<lmdb::Lmdb>::new()),
        #[cfg(has_rocksdb)]
        "rocksdb" => Box::new(KeyedStore::<rocksdb::RocksDb>::new()),
        #[cfg(has_leveldb)]
        "leveldb" => Box::new(KeyedStore::<leveldb::LevelDb>::new()),
        "sqlite" => Box::new(KeyedStore::<sqlite::Sqlite>::new()),
        "redb" => Box::new(KeyedStore::<redb::Redb>::new()),
        other => {
            return Err(Error::failed("find the database", format!("no {other} in this program")));
        }
    })
}
