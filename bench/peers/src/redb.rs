//! redb. A checkpoint is one write transaction, whose commit syncs.

use keyframe_bench_feed::{Key, KeyValue, Result};
use redb::{Database, ReadOnlyTable, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::Path;

const PAGES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("pages");

/// An open database.
pub struct Redb {
    database: Database,
    /// The table for reading; `None` before the first read.
    reading: Option<ReadOnlyTable<&'static [u8], &'static [u8]>>,
}

impl KeyValue for Redb {
    const NAME: &'static str = "redb";

    fn open(dir: &Path) -> Result<Self> {
        let database =
            Database::create(dir.join("pages.redb")).map_err(|e| Self::failed("open", e))?;
        Ok(Self { database, reading: None })
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        let transaction =
            self.database.begin_write().map_err(|e| Self::failed("begin a transaction", e))?;
        {
            let mut table =
                transaction.open_table(PAGES).map_err(|e| Self::failed("open the table", e))?;
            for (key, value) in entries {
                if table.get(&key[..]).map_err(|e| Self::failed("get", e))?.is_none() {
                    table.insert(&key[..], value).map_err(|e| Self::failed("insert", e))?;
                }
            }
        }
        transaction.commit().map_err(|e| Self::failed("commit", e))
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let table = match self.reading.take() {
            Some(table) => table,
            None => {
                let transaction =
                    self.database.begin_read().map_err(|e| Self::failed("begin reading", e))?;
                transaction.open_table(PAGES).map_err(|e| Self::failed("open the table", e))?
            }
        };
        let found = table.get(&key[..]).map_err(|e| Self::failed("get", e))?;
        if let Some(value) = &found {
            sink(value.value());
        }
        let is_there = found.is_some();
        drop(found);
        self.reading = Some(table);
        Ok(is_there)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}
