#!/bin/bash
# PostgreSQL, Redis and SQLite at work, until the VM ends.
exec > /dev/ttyS0 2>&1
export PATH=$PATH:/usr/lib/postgresql/15/bin
mkdir -p /run/pg && chown postgres /run/pg
ip link set lo up
su postgres -c 'initdb -D /run/pg/data > /run/pg/log && pg_ctl -D /run/pg/data -l /run/pg/log -o "-k /run/pg -c listen_addresses=" -w start > /dev/null' || { echo KF ERROR initdb; cat /run/pg/log; }
su postgres -c 'pgbench -h /run/pg -i -q -s 1 postgres > /dev/null' || echo KF ERROR pgbench
redis-server --save '' --port 6379 --daemonize yes > /dev/null
echo KF READY databases
( while su postgres -c 'pgbench -h /run/pg -c 2 -T 10 postgres' > /run/pg/bench; do grep tps /run/pg/bench; done; echo KF ERROR pgbench ) &
( while redis-benchmark -n 2000 -c 4 -q -t set,get,lpush,zadd > /run/redis.out; do echo redis; done; echo KF ERROR redis ) &
( while sqlite3 /run/t.db 'create table if not exists t(a integer primary key, b real, c text); begin; with recursive n(x) as (select 1 union all select x+1 from n where x<500) insert into t(b,c) select random()/3.7, hex(randomblob(40)) from n; commit; select "sqlite", count(*), avg(b)/sum(b) from t; delete from t where a%3=0;'; do :; done; echo KF ERROR sqlite ) &
wait
