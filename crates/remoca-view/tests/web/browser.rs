//! The page in a real browser: its table is what the page's interface says, and nothing is asked of anybody else.

use super::site::{Site, content};
use remoca_view::testing::browser::Browser;
use serde_json::Value;

/// Returns the text and the value of a cell in the page's table.
fn cell<'a>(dom: &'a str, vm: &str, key: &str) -> (&'a str, Option<f64>) {
    let (_, row) = dom.split_once(&format!("data-vm=\"{vm}\"")).unwrap_or_else(|| panic!("no row of {vm}: {dom}"));
    let (row, _) = row.split_once("</tr>").unwrap();
    let (_, cell) = row.split_once(&format!("data-key=\"{key}\"")).unwrap_or_else(|| panic!("no {key}: {row}"));
    let (attributes, rest) = cell.split_once('>').unwrap();
    let (text, _) = rest.split_once("</td>").unwrap();
    let value =
        attributes.split_once("data-value=\"").map(|(_, rest)| rest.split_once('"').unwrap().0.parse().unwrap());
    (text, value)
}

/// Returns the number of the snapshot that the page shows.
fn number(dom: &str) -> u64 {
    let (_, rest) = dom.split_once("data-snapshot=\"").unwrap_or_else(|| panic!("no snapshot is shown: {dom}"));
    rest.split_once('"').unwrap().0.parse().unwrap()
}

#[test]
fn the_table_in_a_browser_is_the_snapshot() {
    let Some(browser) = Browser::find() else { return };
    let site = Site::start(3);
    site.change(1, |status| status.cache.granted_bytes = 256 << 20);
    // The page may show another snapshot than the one that is read beside it.
    for _ in 0..20 {
        let before: Value = serde_json::from_str(content(&site.get("/api/overview", ""))).unwrap();
        let seen = browser.open(&format!("http://{}/", site.address));
        let after: Value = serde_json::from_str(content(&site.get("/api/overview", ""))).unwrap();
        seen.expect_no_other_host(&site.address.to_string());
        assert!(
            seen.dom.contains("warning  web001") && seen.dom.contains("full: 256M of the 2G wanted"),
            "{}",
            seen.dom
        );
        let shown = number(&seen.dom);
        let Some(overview) = [before, after].into_iter().find(|overview| overview["snapshot"] == shown) else {
            continue;
        };
        expect_table(&seen.dom, &overview);
        return;
    }
    panic!("the browser never showed a snapshot that was read");
}

fn expect_table(dom: &str, overview: &Value) {
    let columns = overview["columns"].as_array().unwrap();
    for row in overview["rows"].as_array().unwrap() {
        for (column, wanted) in columns.iter().zip(row["cells"].as_array().unwrap()) {
            let (name, key) = (row["name"].as_str().unwrap(), column["key"].as_str().unwrap());
            let (text, value) = cell(dom, name, key);
            assert_eq!((text, value), (wanted["text"].as_str().unwrap(), wanted["value"].as_f64()), "{name} {key}");
        }
    }
}

#[test]
fn what_a_curve_learns_from_is_said_in_words() {
    let Some(browser) = Browser::find() else { return };
    let site = Site::start(4);
    site.change(3, |status| {
        status.counters.remove("evictions_reported");
        let port = status.port.as_mut().unwrap();
        (port.agent, port.agent_heard_s_ago) = (None, None);
    });
    for (vm, words) in [
        ("web000", "evictions are those that the agent reports"),
        ("web001", "evictions are seen in guest memory that reads overwrite, without an agent"),
        ("web002", "no evictions are seen, so this is a cache into which reads are admitted"),
        ("web003", "no agent has reported yet, so no evictions are seen, and this says too little"),
    ] {
        let seen = browser.open(&format!("http://{}/#vm={vm}", site.address));
        let said = format!(" blocks read; {words}; as of ");
        assert!(seen.dom.contains(&said), "`{said}` is missing in {}", seen.dom);
    }
}

#[test]
fn details_are_shown_in_a_browser_and_odd_names_are_text() {
    let Some(browser) = Browser::find() else { return };
    let site = Site::start(2);
    site.change(1, |status| {
        status.name = "<img src=x onerror=alert(1)>".into();
        status.notice = Some("<script>document.title = 'run'</script>".into());
    });
    let seen = browser.open(&format!("http://{}/#vm=web000&theme=dark", site.address));
    seen.expect_no_other_host(&site.address.to_string());
    for part in ["data-theme=\"dark\"", "Hits, % of the blocks read", "tcp:donor2:7070", "(now)", "evictions_reported"]
    {
        assert!(seen.dom.contains(part), "`{part}` is missing in {}", seen.dom);
    }
    assert!(!seen.dom.contains("<img") && seen.dom.contains("&lt;img src=x"), "{}", seen.dom);
    assert!(!seen.dom.contains("<title>run"), "{}", seen.dom);
    assert!(!seen.said.contains("Content Security Policy"), "{}", seen.said);
}
