//! Plans as files: one line of JSON for the conditions, and one for each step. A reduced plan is saved as a file
//! because a change in how plans are drawn gives every seed another meaning.

use crate::plan::{Origin, Plan, Step};
use crate::scenario::Scenario;
use crate::{HostRule, Options};
use remoca_core::rules::Rule;
use serde::{Deserialize, Serialize};

/// The first line.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Header {
    /// Purpose of the plan, for readers.
    what: String,
    /// Rule that must be left out for the plan to fail; `None` if it must pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    omit: Option<String>,
    agentless: bool,
    guest_visible_only: bool,
    scenario: Scenario,
}

/// A plan read from a file, with the options that it was saved with.
#[derive(Debug)]
pub struct Saved {
    pub plan: Plan,
    pub options: Options,
    pub what: String,
}

/// Returns a plan as text, with those of its steps that `options` include.
///
/// # Errors
/// If a value cannot be written as JSON, which does not happen.
pub fn save(plan: &Plan, options: &Options, what: &str) -> Result<String, serde_json::Error> {
    let engine = Rule::ALL.iter().find(|(_, rule)| Some(*rule) == options.omit).map(|(name, _)| *name);
    let host = HostRule::ALL.iter().find(|(_, rule)| Some(*rule) == options.omit_host).map(|(name, _)| *name);
    let header = Header {
        what: what.into(),
        omit: engine.or(host).map(Into::into),
        agentless: options.agentless,
        guest_visible_only: options.guest_visible_only,
        scenario: plan.scenario.clone(),
    };
    let mut text = serde_json::to_string(&header)? + "\n";
    for step in plan.steps.iter().filter(|step| options.includes(step.number)) {
        text += &(serde_json::to_string(step)? + "\n");
    }
    Ok(text)
}

/// Parses the plan in `text`, which came from a file called `name`.
///
/// # Errors
/// If the text is not a valid plan; the message says why.
pub fn load(name: &str, text: &str) -> Result<Saved, String> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().ok_or_else(|| format!("{name} is empty"))?;
    let header: Header = serde_json::from_str(first).map_err(|error| format!("{name}, first line: {error}"))?;
    let mut options =
        Options { agentless: header.agentless, guest_visible_only: header.guest_visible_only, ..Options::default() };
    if let Some(rule) = &header.omit {
        options.omit = Rule::ALL.iter().find(|(name, _)| name == rule).map(|(_, rule)| *rule);
        options.omit_host = HostRule::ALL.iter().find(|(name, _)| name == rule).map(|(_, rule)| *rule);
        if (options.omit, options.omit_host) == (None, None) {
            return Err(format!("{name}: there is no rule {rule}"));
        }
    }
    let step = |(number, line)| {
        serde_json::from_str::<Step>(line).map_err(|error| format!("{name}, step in line {}: {error}", number + 2))
    };
    let steps = lines.enumerate().map(step).collect::<Result<_, _>>()?;
    let plan = Plan { origin: Origin::File(name.into()), scenario: header.scenario, steps };
    plan.check().map_err(|why| format!("{name}: {why}"))?;
    Ok(Saved { plan, options, what: header.what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_loaded() {
        let plan = Plan::draw(5);
        let options = Options { omit_host: Some(HostRule::Fence), steps: Some(20), ..Options::default() };
        let text = save(&plan, &options, "a test").unwrap();
        let saved = load("x", &text).unwrap();
        assert_eq!(saved.options.omit_host, options.omit_host);
        assert_eq!((saved.what.as_str(), saved.plan.steps.len()), ("a test", 20));
        assert_eq!(format!("{:?}", saved.plan.scenario), format!("{:?}", plan.scenario));
        assert_eq!(format!("{:?}", saved.plan.steps), format!("{:?}", &plan.steps[..20]));
    }

    #[test]
    fn what_is_no_plan_is_refused() {
        assert!(load("x", "").is_err() && load("x", "{}").is_err() && load("x", "plan").is_err());
        let text = save(&Plan::draw(5), &Options::default(), "").unwrap();
        assert!(load("x", &text.replace("\"vm\":0", "\"vm\":9")).is_err());
    }
}
