//! SQLite. A checkpoint is one transaction, and each commit syncs the write-ahead log.

use keyframe_bench_feed::{Key, KeyValue, Result};
use rusqlite::{Connection, OptionalExtension};
use std::path::Path;

/// An open database.
pub struct Sqlite(Connection);

fn failed(operation: &str) -> impl FnOnce(rusqlite::Error) -> keyframe_bench_feed::Error {
    move |e| Sqlite::failed(operation, e)
}

impl KeyValue for Sqlite {
    const NAME: &'static str = "sqlite";

    fn open(dir: &Path) -> Result<Self> {
        let connection = Connection::open(dir.join("pages.sqlite")).map_err(failed("open"))?;
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL;
                 PRAGMA synchronous = FULL;
                 CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, value BLOB NOT NULL);",
            )
            .map_err(failed("make a table"))?;
        Ok(Self(connection))
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        let transaction = self.0.transaction().map_err(failed("begin a transaction"))?;
        {
            let mut insert = transaction
                .prepare("INSERT OR IGNORE INTO pages VALUES (?1, ?2)")
                .map_err(failed("prepare an insertion"))?;
            for (key, value) in entries {
                insert.execute((&key[..], value)).map_err(failed("insert"))?;
            }
        }
        transaction.commit().map_err(failed("commit"))
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        // The connection keeps the statement for the next call.
        let mut select = self
            .0
            .prepare_cached("SELECT value FROM pages WHERE key = ?1")
            .map_err(failed("prepare a query"))?;
        let found = select.query_row((&key[..],), |row| {
            sink(row.get_ref(0)?.as_blob()?);
            Ok(())
        });
        Ok(found.optional().map_err(failed("select"))?.is_some())
    }

    fn close(self) -> Result<()> {
        self.0.close().map_err(|(_, e)| Self::failed("close", e))
    }
}
