//! What the check of each page's fingerprint costs: CPU of server and client for a get, with the check and without (P8).

use std::time::Duration;

use anyhow::Result;
use remoca_lab::figures::Figure;

use super::client::{self, Connection, Tags};
use super::dialect::Dialect;
use super::target::Target;
use crate::cpus::{Cpus, pin_this_thread};
use crate::rounds::{Rounds, Side};

const DEPTH: usize = 32;

/// Measures the figure over `pages` pages, for `slice` each time.
pub(crate) fn figure(rounds: usize, slice: Duration, pages: u32) -> Result<Figure> {
    let target = Target::remoca(pages)?;
    let cpus = Cpus::choose()?;
    pin_this_thread(cpus.client)?;
    target.pin(cpus.server)?;
    let mut connection = Connection::open(target.address, Dialect::Remoca, 0..pages, 1)?;
    connection.store_all()?;
    connection.verify_all()?;
    let tags = Tags::new(pages);
    let mut seed = 0;
    let rounds = Rounds::take(rounds, |side| {
        seed += 1;
        connection.check_tags((side == Side::Ours).then(|| tags.clone()));
        let before = target.cpu()?;
        let measure = client::get(std::slice::from_mut(&mut connection), DEPTH, slice, seed)?;
        // The server's CPU time is exact only while it sleeps, as it does when it is idle.
        std::thread::sleep(Duration::from_millis(2));
        let spent = target.cpu()? - before + measure.client_cpu;
        Ok(spent.as_secs_f64() * 1e6 / measure.pages_f64())
    })?;
    rounds.figure_with("P8-tag", "with_us", "without_us")
}
