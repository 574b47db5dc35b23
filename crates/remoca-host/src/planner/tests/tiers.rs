//! Memory behind a local tier, and what goes from one tier to the other.

use super::world::{Nature, Process, Shape, TOTAL, UNIT, World, honest, settings, sizes};
use crate::planner::{GuestRecord, Move, Planner, Settings, Side, Stage};
use crate::resource::Resource;

#[test]
fn memory_behind_a_local_tier_is_worth_what_the_curve_says_beyond_it() {
    // The cliff is 130 units from the start of the queue, of which the local tier has 100.
    let mut world = World::new(vec![honest(Shape::Cliff(130), 10), honest(Shape::Flat(50), 190)]);
    world.process("vm0").first = 100;
    world.run(40, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world)[0], 33, "two percent of all 130 beyond the cliff");
    // The local tier has all that its guest reads again: what is behind it is worth nothing.
    let mut world = World::new(vec![honest(Shape::Cliff(130), 10), honest(Shape::Smooth(50), 190)]);
    world.process("vm0").first = 140;
    world.run(40, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world), [1, 199]);
}

#[test]
fn a_vm_without_a_local_tier_gets_one_that_pays() {
    let mut world = World::new(vec![honest(Shape::Cliff(90), 0), honest(Shape::Smooth(20), 200)]);
    world.run(60, |world| assert!(world.held() <= TOTAL));
    assert_eq!(sizes(&world)[0], 92);
}

#[test]
fn one_that_refuses_costs_the_others_nothing_for_long() {
    let refuses = Process::new(Shape::Cliff(150), Nature::Refuses, 50);
    let mut world = World::new(vec![refuses, honest(Shape::Smooth(40), 150)]);
    world.run(61, |world| assert!(world.held() <= TOTAL));
    assert_eq!(world.processes["vm0"].wanted, 50);
    let asked = world.steps.iter().filter(|(_, step)| step.vm == "vm0").count();
    assert_eq!(asked, 1, "it is not asked again for ten windows: {:?}", world.steps);
    assert_eq!(world.processes["vm1"].wanted, 150, "what was taken for it is given back");
    let refused =
        world.planner.report(world.at).decisions.into_iter().find(|decision| decision.vm.as_deref() == Some("vm0"));
    assert_eq!(refused.unwrap().outcome, "not done: it refused: no");
    assert_eq!(world.planner.failed(), 1);
}

#[test]
fn a_plan_for_one_tier_is_not_carried_out_on_the_other() {
    let mut world = World::new(vec![honest(Shape::Cliff(130), 100), honest(Shape::Flat(50), 100)]);
    world.delay = u32::MAX;
    world.run(2, |_| {});
    let record = world.planner.record();
    assert!(record.intent.is_some() && record.resource == Resource::Cache);
    let with = |resource: Resource| Planner::new(Settings { resource, ..settings() }, record.clone()).record();
    assert_eq!(with(Resource::Cache).intent, record.intent);
    let other = with(Resource::Local);
    assert!(other.intent.is_none() && other.sizes.is_empty() && other.resource == Resource::Local);
    // What its guest was to get counts as given, and its balloon may not have heard of it.
    let given = Move { vm: "vm0".into(), side: Side::Guest, to_bytes: UNIT, stage: Stage::Begun, ..Move::default() };
    let mut with_guest = record.clone();
    with_guest.guests.insert("vm0".into(), GuestRecord::default());
    with_guest.intent.as_mut().unwrap().moves.push(given);
    let planner = Planner::new(Settings { resource: Resource::Local, ..settings() }, with_guest);
    assert!(planner.record().guests["vm0"].is_untold);
    // A record of an older daemon is of the caches.
    let older = r#"{"intent":null,"sizes":{},"decisions":[]}"#;
    assert_eq!(serde_json::from_str::<crate::planner::Record>(older).unwrap().resource, Resource::Cache);
}
