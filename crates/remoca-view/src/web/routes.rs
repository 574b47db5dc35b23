//! The paths of the page and what they answer.

use super::guard::{self, Hosts};
use super::{api, page};
use crate::metrics::{self, Form};
use crate::snapshot::Snapshot;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tokio::sync::watch;

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";

/// Headers of every answer.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// What all requests share.
pub struct Site {
    snapshots: watch::Receiver<Option<Arc<Snapshot>>>,
    newest: Mutex<Option<Arc<Published>>>,
    hosts: Hosts,
    html: Bytes,
    policy: HeaderValue,
}

/// A snapshot, and what was made of it. Each form is made once, however often it is asked for.
struct Published {
    snapshot: Arc<Snapshot>,
    overview: OnceLock<Bytes>,
    whole: OnceLock<Bytes>,
    statuses: OnceLock<Bytes>,
    /// Everything about each VM, in the order of the snapshot.
    details: Vec<OnceLock<Bytes>>,
    metrics: [OnceLock<Bytes>; 2],
}

impl Published {
    fn of(snapshot: Arc<Snapshot>) -> Self {
        let [overview, whole, statuses, one, other] = [const { OnceLock::new() }; 5];
        let details = snapshot.vms.iter().map(|_| OnceLock::new()).collect();
        Self { snapshot, overview, whole, statuses, details, metrics: [one, other] }
    }
}

impl Site {
    /// Returns the site that shows the newest of `snapshots` to those who call it by one of `hosts`.
    #[must_use]
    pub fn new(snapshots: watch::Receiver<Option<Arc<Snapshot>>>, hosts: Hosts) -> Arc<Self> {
        let policy = HeaderValue::from_str(&page::policy()).unwrap_or(HeaderValue::from_static("default-src 'none'"));
        Arc::new(Self { snapshots, newest: Mutex::default(), hosts, html: page::html().into(), policy })
    }

    /// Returns the newest snapshot. Waits for the first one, which takes a second at most.
    async fn newest(&self) -> Option<Arc<Published>> {
        let mut snapshots = self.snapshots.clone();
        let snapshot = snapshots.wait_for(Option::is_some).await.ok()?.clone()?;
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if !newest.as_ref().is_some_and(|published| Arc::ptr_eq(&published.snapshot, &snapshot)) {
            *newest = Some(Arc::new(Published::of(snapshot)));
        }
        newest.clone()
    }
}

/// Returns what answers all requests.
pub fn router(site: &Arc<Site>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/api/overview", get(overview))
        .route("/api/snapshot", get(whole))
        .route("/api/status", get(statuses))
        .route("/api/vm/{name}", get(vm))
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(health))
        .fallback(nothing)
        .layer(from_fn_with_state(Arc::clone(site), watched))
        .with_state(Arc::clone(site))
}

/// Refuses what is not answered, and adds the headers of every answer.
async fn watched(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let refusal = guard::refusal(request.method(), request.uri(), request.headers(), &site.hosts);
    let mut response = match refusal {
        Some((status, text)) => {
            let mut response = answer(status, TEXT, text);
            if status == StatusCode::METHOD_NOT_ALLOWED {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            }
            // A body that came along is not read.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        }
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CONTENT_SECURITY_POLICY, site.policy.clone());
    response
}

fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn not_ready() -> Response {
    answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, "there is no snapshot yet: this program is about to end\n")
}

async fn index(State(site): State<Arc<Site>>) -> Response {
    answer(StatusCode::OK, HTML, site.html.clone())
}

async fn overview(State(site): State<Arc<Site>>) -> Response {
    let Some(newest) = site.newest().await else { return not_ready() };
    let make = || serde_json::to_vec(&api::Overview::of(&newest.snapshot)).unwrap_or_default().into();
    answer(StatusCode::OK, JSON, newest.overview.get_or_init(make).clone())
}

async fn whole(State(site): State<Arc<Site>>) -> Response {
    let Some(newest) = site.newest().await else { return not_ready() };
    answer(StatusCode::OK, JSON, newest.whole.get_or_init(|| newest.snapshot.json().into()).clone())
}

/// Answers with what `remoca status -o json` prints.
async fn statuses(State(site): State<Arc<Site>>) -> Response {
    let Some(newest) = site.newest().await else { return not_ready() };
    let make = || serde_json::to_vec(&newest.snapshot.statuses().collect::<Vec<_>>()).unwrap_or_default().into();
    answer(StatusCode::OK, JSON, newest.statuses.get_or_init(make).clone())
}

async fn vm(State(site): State<Arc<Site>>, Path(name): Path<String>) -> Response {
    let Some(newest) = site.newest().await else { return not_ready() };
    let mut all = newest.snapshot.vms.iter().zip(&newest.details);
    let Some((vm, made)) = all.find(|(vm, _)| vm.name == name) else {
        return answer(StatusCode::NOT_FOUND, TEXT, "there is no VM of that name\n");
    };
    let make = || api::details(&newest.snapshot, vm).into();
    answer(StatusCode::OK, JSON, made.get_or_init(make).clone())
}

async fn show_metrics(State(site): State<Arc<Site>>, headers: HeaderMap) -> Response {
    let Some(newest) = site.newest().await else { return not_ready() };
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let form = Form::wanted(accept);
    let made = &newest.metrics[usize::from(form == Form::OpenMetrics)];
    let make = || metrics::text(&newest.snapshot, form).into();
    answer(StatusCode::OK, form.content_type(), made.get_or_init(make).clone())
}

async fn health() -> Response {
    answer(StatusCode::OK, TEXT, "ok\n")
}

async fn nothing() -> Response {
    answer(
        StatusCode::NOT_FOUND,
        TEXT,
        "there is nothing here: see /, /metrics, /api/overview, /api/snapshot, /api/status, /api/vm/NAME\n",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::full_snapshot;
    use crate::watch::runtime;
    use axum::body::to_bytes;
    use serde_json::Value;

    /// Returns the answers with figures: all VMs in short, the snapshot, the statuses, one VM, and both forms of the metrics.
    async fn answers(site: &Arc<Site>) -> Vec<Bytes> {
        let site = || State(Arc::clone(site));
        let open = HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static("application/openmetrics-text"))]);
        let mut bodies = Vec::new();
        for answer in [
            overview(site()).await,
            whole(site()).await,
            statuses(site()).await,
            vm(site(), Path("web001".into())).await,
            show_metrics(site(), HeaderMap::new()).await,
            show_metrics(site(), open).await,
        ] {
            assert_eq!(answer.status(), StatusCode::OK);
            bodies.push(to_bytes(answer.into_body(), usize::MAX).await.unwrap());
        }
        bodies
    }

    #[test]
    fn each_answer_is_made_once_for_each_snapshot() {
        let (publish, snapshots) = watch::channel(Some(Arc::new(full_snapshot(3))));
        let site = Site::new(snapshots, Hosts::new(&[], &[]));
        let read = || runtime().unwrap().block_on(answers(&site));
        let (first, again) = (read(), read());
        for (first, again) in first.iter().zip(&again) {
            assert!(std::ptr::eq(first.as_ptr(), again.as_ptr()), "made twice: {first:?}");
        }
        let [whole, statuses, vm] = [1, 2, 3].map(|at| serde_json::from_slice::<Value>(&first[at]).unwrap());
        let of_whole: Vec<&Value> = whole["vms"].as_array().unwrap().iter().map(|vm| &vm["status"]).collect();
        assert_eq!(statuses.as_array().unwrap().iter().collect::<Vec<_>>(), of_whole);
        assert_eq!(vm["vm"], whole["vms"][1]);
        publish.send_replace(Some(Arc::new(Snapshot { snapshot: 3, ..full_snapshot(2) })));
        for (old, new) in first.iter().zip(read()) {
            assert_ne!(*old, new, "that of the snapshot before");
        }
    }
}
