//! A status as other programs read it (`remoca status -o json`): keys stay, and keys that an older version did not send
//! have a default value.

use remoca_protocol::control::{
    CacheStatus, DiskStatus, DiskTraffic, HedgingStatus, KnownServerStatus, Latencies, LatencySummary, MemoryStatus,
    MigrationStatus, NormalLatency, PoolStatus, PortStatus, Reply, ServerStatus, Status,
};
use remoca_protocol::port::AgentStats;

const LATENCY: &str = r#"{"count":1,"sum_ns":2000,"mean_us":2.0,"p50_us":2.0,"p99_us":2.0,"p999_us":2.0,"max_us":2.0}"#;

fn latency() -> LatencySummary {
    LatencySummary { count: 1, sum_ns: 2000, mean_us: 2.0, p50_us: 2.0, p99_us: 2.0, p999_us: 2.0, max_us: 2.0 }
}

fn disk() -> DiskStatus {
    DiskStatus {
        name: "a".into(),
        image: "/a".into(),
        socket: "/s".into(),
        bytes: 4096,
        shrunk_from_bytes: Some(8192),
        guest_sees_size: true,
        read_only: false,
        store: "waiting".into(),
        store_error: Some("refused".into()),
        failed_flush: Some("ENOSPC".into()),
        cold_reason: None,
        attached: true,
        outlives_crash: true,
        swap_areas: 1,
        nbd_clients: None,
        offers_more: true,
        traffic: DiskTraffic { reads: 1, read_bytes: 4096, reads_from_cache: 1, writes: 2, written_bytes: 1024 },
    }
}

fn port() -> PortStatus {
    let agent =
        AgentStats { captured: 1, lost: 2, sampled_out: 3, written: 4, cookie: 5, memory_wait: Some(6), classes: 7 };
    PortStatus {
        socket: "/p".into(),
        attached: true,
        outlives_crash: false,
        nbd_clients: Some(1),
        offers_more: true,
        agent: Some(agent),
        agent_heard_s_ago: Some(2),
        advice: 64,
        class_advice: 128,
    }
}

fn pool() -> PoolStatus {
    PoolStatus {
        server: "unix:/m".into(),
        state: "connected".into(),
        is_mapped: true,
        is_local_tier: true,
        generation: "00000000000000ff".into(),
        granted_bytes: 4096,
        used_bytes: 8192,
        hits: 5,
        latency_us: Some(1.5),
        pages_sent: 3,
        pages_requested: 2,
        pages_received: 1,
        pages_taken_back: 4,
    }
}

fn status() -> Status {
    let server = "unix:/m".to_owned();
    let known = KnownServerStatus {
        endpoint: server.clone(),
        is_local_tier: false,
        in_use: true,
        possible_bytes: Some(8192),
        answered_s_ago: Some(3),
        error: None,
        lies: Some(2),
    };
    let normal = |p50_us| NormalLatency { p50_us, p99_us: 9.5 };
    Status {
        name: "vm".into(),
        pid: 7,
        version: "0.1.0".into(),
        is_replaced: true,
        upgrades: 2,
        uptime_s: 1.5,
        started: "warm".into(),
        cold_reason: None,
        state_lost: Some("no room".into()),
        server: Some(ServerStatus { endpoint: server, connected: true, breaker: "closed".into(), error: None }),
        servers: vec![known],
        pools: vec![pool()],
        cache: CacheStatus {
            enabled: true,
            wanted_bytes: 8192,
            granted_bytes: 4096,
            granted_at_most_bytes: 8192,
            used_bytes: 0,
            local_wanted_bytes: 12288,
            local_granted_bytes: 4096,
            local_granted_at_most_bytes: 12288,
            local_server: Some("local:/l".into()),
            admission: "reads".into(),
            insertion: "lru".into(),
            lru_hit_ratio: Some(0.5),
            bimodal_hit_ratio: None,
            hit_ratio: Some(0.5),
        },
        disks: vec![disk()],
        port: Some(port()),
        counters: [("hits".to_owned(), 3)].into(),
        latency: Latencies { read: latency(), read_from_cache: latency(), read_from_disk: latency(), write: latency() },
        hedging: HedgingStatus { is_off: true, late_after_us: 100.0, disk: Some(normal(1.5)), server: None },
        memory: MemoryStatus {
            index_bytes: 1,
            buffer_bytes: 2,
            known_blocks: 3,
            guest_bytes: 4,
            guest_bytes_indexed: 5,
            guest_resident_bytes: Some(6),
        },
        migration: Some(MigrationStatus { has_disks: true, incoming: None, peer: None, news: Some("n".into()) }),
        notice: Some("a file is broken".into()),
        trace_lost: Some(6),
    }
}

#[test]
fn a_status_is_this_line() {
    let line = [
        r#"{"name":"vm","pid":7,"version":"0.1.0","is_replaced":true,"upgrades":2,"uptime_s":1.5,"started":"warm","cold_reason":null,"#,
        r#""state_lost":"no room","notice":"a file is broken","#,
        r#""server":{"endpoint":"unix:/m","connected":true,"breaker":"closed","error":null},"#,
        r#""servers":[{"endpoint":"unix:/m","is_local_tier":false,"in_use":true,"possible_bytes":8192,"answered_s_ago":3,"error":null,"lies":2}],"#,
        r#""pools":[{"server":"unix:/m","state":"connected","is_mapped":true,"is_local_tier":true,"generation":"00000000000000ff","granted_bytes":4096,"used_bytes":8192,"hits":5,"latency_us":1.5,"#,
        r#""pages_sent":3,"pages_requested":2,"pages_received":1,"pages_taken_back":4}],"#,
        r#""cache":{"enabled":true,"wanted_bytes":8192,"granted_bytes":4096,"granted_at_most_bytes":8192,"used_bytes":0,"local_wanted_bytes":12288,"local_granted_bytes":4096,"local_granted_at_most_bytes":12288,"local_server":"local:/l","admission":"reads","#,
        r#""insertion":"lru","lru_hit_ratio":0.5,"bimodal_hit_ratio":null,"hit_ratio":0.5},"#,
        r#""disks":[{"name":"a","image":"/a","socket":"/s","bytes":4096,"shrunk_from_bytes":8192,"#,
        r#""guest_sees_size":true,"read_only":false,"store":"waiting","store_error":"refused","#,
        r#""failed_flush":"ENOSPC","cold_reason":null,"attached":true,"outlives_crash":true,"swap_areas":1,"nbd_clients":null,"offers_more":true,"#,
        r#""traffic":{"reads":1,"read_bytes":4096,"reads_from_cache":1,"writes":2,"written_bytes":1024}}],"#,
        r#""port":{"socket":"/p","attached":true,"outlives_crash":false,"nbd_clients":1,"offers_more":true,"#,
        r#""agent":{"captured":1,"lost":2,"sampled_out":3,"written":4,"cookie":5,"memory_wait":6,"classes":7},"agent_heard_s_ago":2,"advice":64,"class_advice":128},"#,
        r#""counters":{"hits":3},"#,
        r#""latency":{"read":LATENCY,"read_from_cache":LATENCY,"read_from_disk":LATENCY,"write":LATENCY},"#,
        r#""hedging":{"is_off":true,"late_after_us":100.0,"disk":{"p50_us":1.5,"p99_us":9.5},"server":null},"#,
        r#""memory":{"index_bytes":1,"buffer_bytes":2,"known_blocks":3,"guest_bytes":4,"guest_bytes_indexed":5,"guest_resident_bytes":6},"#,
        r#""migration":{"has_disks":true,"incoming":null,"peer":null,"news":"n"},"trace_lost":6}"#,
    ];
    let line = line.concat().replace("LATENCY", LATENCY);
    let written = Reply::Status(Box::new(status())).line().unwrap();
    assert_eq!(String::from_utf8(written).unwrap(), format!("{line}\n"));
    let Ok(Reply::Status(read)) = Reply::parse(line.as_bytes()) else { panic!("it is a status") };
    assert_eq!(Reply::Status(read).line().unwrap(), format!("{line}\n").as_bytes());
}

#[test]
fn what_a_former_version_did_not_say_has_a_value() {
    let mut text = String::from_utf8(Reply::Status(Box::new(status())).line().unwrap()).unwrap();
    let later = [
        r#""is_replaced":true,"upgrades":2,"#,
        r#""started":"warm","cold_reason":null,"#,
        r#""state_lost":"no room","#,
        r#""failed_flush":"ENOSPC","cold_reason":null,"#,
        r#","store_error":"refused""#,
        r#""swap_areas":1,"#,
        r#","traffic":{"reads":1,"read_bytes":4096,"reads_from_cache":1,"writes":2,"written_bytes":1024}"#,
        r#""agent_heard_s_ago":2,"#,
        r#","memory_wait":6,"classes":7"#,
        r#","class_advice":128"#,
        r#""shrunk_from_bytes":8192,"guest_sees_size":true,"#,
        r#","guest_bytes":4,"guest_bytes_indexed":5,"guest_resident_bytes":6"#,
        r#""pools":[{"server":"unix:/m","state":"connected","is_mapped":true,"is_local_tier":true,"generation":"00000000000000ff","granted_bytes":4096,"used_bytes":8192,"hits":5,"latency_us":1.5,"pages_sent":3,"pages_requested":2,"pages_received":1,"pages_taken_back":4}],"#,
        r#","migration":{"has_disks":true,"incoming":null,"peer":null,"news":"n"},"trace_lost":6"#,
    ];
    for part in later {
        assert!(text.contains(part), "{part}");
        text = text.replace(part, "");
    }
    let Ok(Reply::Status(status)) = Reply::parse(text.as_bytes()) else { panic!("it is a status") };
    assert_eq!((status.upgrades, status.memory.guest_bytes, status.trace_lost), (0, 0, None));
    assert!(status.migration.is_none() && status.disks[0].failed_flush.is_none() && status.disks[0].swap_areas == 0);
    assert!(status.pools.is_empty() && status.memory.guest_resident_bytes.is_none());
    assert!(status.disks[0].shrunk_from_bytes.is_none() && status.disks[0].guest_sees_size);
    assert!(status.disks[0].store_error.is_none());
}
