//! `cargo xtask screenshots`: pictures of the page and of the terminal for the documentation, of VMs that are none.

use remoca_view::testing::Fleet;
use remoca_view::testing::browser::Browser;
use remoca_view::top::{App, height, screen, svg};
use remoca_view::watch::{Watch, runtime};
use remoca_view::web::{self, Options};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const VMS: u32 = 12;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let target = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("docs/images"), PathBuf::from);
    std::fs::create_dir_all(&target)?;
    let folder = tempfile::tempdir()?;
    let fleet = Fleet::start(folder.path(), VMS);
    ail(&fleet);
    let snapshot = {
        let sockets = fleet.sockets.clone();
        let mut watch = Watch::new(Box::new(move || sockets.clone()), Duration::from_secs(5));
        runtime()?.block_on(async {
            for _ in 0..59 {
                watch.take().await;
            }
            watch.take().await
        })
    };
    let mut app = App::default();
    app.take(Ok(Arc::new(snapshot)));
    let whole = screen(&app, 160, height(&app, 160), true);
    std::fs::write(target.join("top.svg"), svg::picture(&whole))?;
    (app.has_details, app.selected) = (true, Some("web003".into()));
    std::fs::write(target.join("top-details.svg"), svg::picture(&screen(&app, 160, 50, false)))?;

    let Some(browser) = Browser::find() else { return Err("there is no browser".into()) };
    let sockets = fleet.sockets.clone();
    let options = Options {
        listen: vec!["127.0.0.1:0".parse()?],
        hosts: Vec::new(),
        group: None,
        interval: Duration::from_millis(50),
        sockets: Box::new(move || sockets.clone()),
        host_socket: None,
    };
    let (ready, is_ready) = channel();
    std::thread::spawn(move || web::run(options, |addresses| drop(ready.send(addresses[0].clone()))));
    let address = is_ready.recv()?;
    browser.picture(&format!("{address}#theme=light"), [1280, 720], &target.join("page.png"));
    browser.picture(&format!("{address}#theme=dark&vm=web003"), [1280, 1500], &target.join("page-details.png"));
    for name in ["top.svg", "top-details.svg", "page.png", "page-details.png"] {
        println!("{}", target.join(name).display());
    }
    Ok(())
}

/// Makes some of the VMs ill.
fn ail(fleet: &Fleet) {
    fleet.change(2, |status| {
        status.hedging.disk = Some(remoca_protocol::control::NormalLatency { p50_us: 184_000.0, p99_us: 910_000.0 });
    });
    fleet.change(5, |status| {
        status.cache.granted_bytes /= 4;
        status.cache.used_bytes = status.cache.granted_bytes;
        status.servers.iter_mut().for_each(|server| server.possible_bytes = Some(256 << 20));
        status.pools.truncate(2);
        status.pools.iter_mut().for_each(|pool| pool.granted_bytes = 256 << 20);
    });
    fleet.change(7, |status| {
        if let Some(port) = &mut status.port {
            port.agent_heard_s_ago = Some(412);
        }
    });
    fleet.change(9, |status| {
        status.counters.insert("fetch_wrong".into(), 12);
    });
}
