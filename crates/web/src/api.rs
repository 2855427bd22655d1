//! The routes of the HTTP API and their handlers.
//!
//! [`routes`] has a line for each route; `docs/api/openapi.json` describes them.

use crate::event_hub::{EventHub, LiveEvent};
use crate::guard::{AccessGuard, AccessRefusal, HEADERS};
use crate::request_log::RequestLogLine;
use crate::source::{ApiError, DashboardAction, DashboardSource};
use crate::timeline::{POINTS_MAX, Timeline, chunks};
use crate::{LogFormat, metrics, page};
use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::handler::Handler;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::sync::broadcast::error::RecvError;

/// The description of the API, as an OpenAPI document in JSON.
pub const OPENAPI: &str = include_str!("../../../docs/api/openapi.json");
/// The most checkpoints in an answer.
const LIST_MAX: usize = 500;
const LIST_DEFAULT: usize = 50;
/// Points of the growth curve.
const GROWTH_POINTS: usize = 300;
/// The most pieces of a heat map.
const PIECES_MAX: u64 = 4096;
const PIECES_DEFAULT: u64 = 512;
/// The most concurrent requests that read page maps and pages.
const SLOW_MAX: usize = 2;
/// The longest time for an answer. The source keeps results, so that a repeated request succeeds.
const ANSWER_MAX: Duration = Duration::from_secs(25);
/// Time between two looks at the source while clients listen for events.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The state that all requests of the API share.
pub struct App {
    source: Arc<dyn DashboardSource>,
    guard: AccessGuard,
    events: EventHub,
    log: Option<LogFormat>,
    slow: Arc<Semaphore>,
}

impl App {
    /// Creates the state of the API: its source of data, its access guard, its events, and the
    /// format of its log (`None`: no log).
    pub fn new(
        source: Arc<dyn DashboardSource>,
        guard: AccessGuard,
        events: EventHub,
        log: Option<LogFormat>,
    ) -> Self {
        Self { source, guard, events, log, slow: Arc::new(Semaphore::new(SLOW_MAX)) }
    }
}

type Shared = State<Arc<App>>;

/// A router that keeps a list of its routes.
pub struct RouteTable {
    router: Router<Arc<App>>,
    /// Method and path of each route.
    pub known: Vec<(&'static str, &'static str)>,
}

impl RouteTable {
    fn add(mut self, method: &'static str, path: &'static str, to: MethodRouter<Arc<App>>) -> Self {
        self.known.push((method, path));
        self.router = self.router.route(path, to);
        self
    }

    fn get<H: Handler<T, Arc<App>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add("get", path, get(handler))
    }

    fn post<H: Handler<T, Arc<App>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add("post", path, post(handler))
    }

    fn delete<H: Handler<T, Arc<App>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add("delete", path, delete(handler))
    }
}

/// Returns the table of all routes, without the files of the page.
pub fn routes() -> RouteTable {
    RouteTable { router: Router::new(), known: Vec::new() }
        .get("/metrics", metrics_text)
        .get("/api/v1/openapi.json", async || page::answer("application/json", OPENAPI))
        .get("/api/v1/server", server)
        .get("/api/v1/vms", async |State(app): Shared| ask(&app, |source| Ok(source.vms())).await)
        .get("/api/v1/stores", async |State(app): Shared| {
            ask(&app, |source| Ok(source.stores())).await
        })
        .get("/api/v1/stores/{store}/timeline", timeline)
        .get("/api/v1/stores/{store}/checkpoints", checkpoints)
        .get("/api/v1/stores/{store}/checkpoints/{id}", checkpoint)
        .get("/api/v1/stores/{store}/checkpoints/{id}/heat", heat)
        .get("/api/v1/stores/{store}/checkpoints/{id}/diff", diff)
        .get("/api/v1/stores/{store}/checkpoints/{id}/screen", screen)
        .get("/api/v1/stores/{store}/growth", growth)
        .get("/api/v1/recordings", async |State(app): Shared| {
            ask(&app, |source| Ok(source.recordings())).await
        })
        .get("/api/v1/events", events)
        .post("/api/v1/stores/{store}/checkpoints/{id}/pin", pin)
        .delete("/api/v1/stores/{store}/checkpoints/{id}/pin", unpin)
        .post("/api/v1/stores/{store}/checkpoints/{id}/rollback", rollback)
        .post("/api/v1/stores/{store}/checkpoints/{id}/branch", branch)
        .post("/api/v1/stores/{store}/checkpoints/{id}/restore", restore)
        .post("/api/v1/stores/{store}/checkpoints/{id}/tags/{tag}", tag)
        .delete("/api/v1/stores/{store}/tags/{tag}", untag)
}

/// Returns the complete router: routes, page files and middleware.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = routes().router;
    for (path, kind, content) in page::FILES {
        router = router.route(path, get(async move || page::answer(kind, content)));
    }
    let unknown =
        || refuse(StatusCode::NOT_FOUND, "there is nothing here", Some("see /api/v1/openapi.json"));
    router
        .fallback(async move || unknown())
        .layer(middleware::from_fn_with_state(Arc::clone(app), handle_request))
        .with_state(Arc::clone(app))
}

/// Returns the router for one connection, which passes the address `peer` to the log.
pub fn with_peer(router: Router, peer: SocketAddr) -> Router {
    router.layer(axum::Extension(Peer(peer)))
}

#[derive(Clone, Copy)]
struct Peer(SocketAddr);

/// The middleware of every request: access control, time limit, security headers, log.
async fn handle_request(State(app): Shared, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = match app.guard.check(&method, &path, request.headers()) {
        Ok(()) => {
            let late = || {
                let fix = "try again: results are kept meanwhile";
                refuse(StatusCode::SERVICE_UNAVAILABLE, "the answer takes too long", Some(fix))
            };
            tokio::time::timeout(ANSWER_MAX, next.run(request)).await.unwrap_or_else(|_| late())
        }
        Err(AccessRefusal { status, error, fix }) => refuse(status, error, Some(fix)),
    };
    for (name, value) in HEADERS {
        response.headers_mut().entry(name).or_insert(value);
    }
    if response.status() == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let (Some(format), Some(peer)) = (app.log, peer) {
        RequestLogLine::of(
            method.as_str(),
            &path,
            response.status().as_u16(),
            began.elapsed(),
            peer,
        )
        .write(format);
    }
    response
}

/// Sends the changes of the dashboard's data to its listeners, once a second for as long as the
/// server runs.
pub async fn send_changes(app: Arc<App>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if app.events.listeners() > 0 {
            let app = Arc::clone(&app);
            // If a look panics, the next one follows.
            let _ = tokio::task::spawn_blocking(move || app.events.refresh(&*app.source)).await;
        }
    }
}

/// A refusal as JSON.
fn refuse(status: StatusCode, error: &str, fix: Option<&str>) -> Response {
    let body = json!({ "error": error, "fix": fix });
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Unknown(_) => StatusCode::NOT_FOUND,
            Self::Bad(_) => StatusCode::BAD_REQUEST,
            Self::NotShown(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        refuse(status, &self.to_string(), None)
    }
}

/// Calls the source on a blocking thread and answers with JSON.
async fn ask<T: Serialize>(
    app: &Arc<App>,
    question: impl FnOnce(&dyn DashboardSource) -> Result<T, ApiError> + Send + 'static,
) -> Response {
    let text = move |source: &dyn DashboardSource| {
        let found = question(source)?;
        serde_json::to_vec(&found).map_err(|e| ApiError::Failed(format!("write JSON: {e}")))
    };
    answer(app, "application/json", text).await
}

/// Calls the source on a blocking thread and answers with bytes of the given content type.
async fn answer<B: AsRef<[u8]>>(
    app: &Arc<App>,
    kind: &'static str,
    question: impl FnOnce(&dyn DashboardSource) -> Result<B, ApiError> + Send + 'static,
) -> Response {
    let app = Arc::clone(app);
    let bytes = move || question(&*app.source).map(|found| found.as_ref().to_vec());
    match tokio::task::spawn_blocking(bytes).await {
        Ok(Ok(bytes)) => ([(header::CONTENT_TYPE, kind)], bytes).into_response(),
        Ok(Err(problem)) => problem.into_response(),
        Err(_) => ApiError::Failed("the request failed; see the server's standard error".into())
            .into_response(),
    }
}

/// As [`ask`], for requests that read much. They run to the end even if the client has gone.
async fn ask_slow<T: Serialize>(
    app: &Arc<App>,
    question: impl FnOnce(&dyn DashboardSource) -> Result<T, ApiError> + Send + 'static,
) -> Response {
    match with_slow_slot(app, question).await {
        Ok(held) => ask(app, held).await,
        Err(problem) => problem.into_response(),
    }
}

/// Waits for a slot for a slow request. The slot is held until the request is answered.
async fn with_slow_slot<T>(
    app: &Arc<App>,
    question: impl FnOnce(&dyn DashboardSource) -> Result<T, ApiError> + Send + 'static,
) -> Result<impl FnOnce(&dyn DashboardSource) -> Result<T, ApiError> + Send + 'static, ApiError> {
    let permit = Arc::clone(&app.slow).acquire_owned().await;
    let permit = permit.map_err(|_| ApiError::Busy("the server ends".into()))?;
    Ok(move |source: &dyn DashboardSource| {
        let _permit = permit;
        question(source)
    })
}

/// Store and number of a checkpoint, from the path.
type CheckpointPath = Result<Path<(String, u64)>, PathRejection>;
/// The parameters of the query string.
struct ApiQuery<T>(T);

impl<T: serde::de::DeserializeOwned> FromRequestParts<Arc<App>> for ApiQuery<T> {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut axum::http::request::Parts,
        app: &Arc<App>,
    ) -> Result<Self, ApiError> {
        let asked: Result<Query<T>, QueryRejection> = Query::from_request_parts(parts, app).await;
        asked.map(|Query(asked)| Self(asked)).map_err(|e| ApiError::Bad(e.body_text()))
    }
}

fn checkpoint_path(path: CheckpointPath) -> Result<(String, u64), ApiError> {
    path.map(|Path(path)| path).map_err(|e| ApiError::Bad(e.body_text()))
}

async fn server(State(app): Shared) -> Response {
    let body = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "reading_needs_token": app.guard.reading_needs_token(),
        "can_act": app.guard.has_token(),
    });
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

async fn metrics_text(State(app): Shared) -> Response {
    let source = Arc::clone(&app.source);
    match tokio::task::spawn_blocking(move || metrics::text(&*source)).await {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
            .into_response(),
        Err(_) => ApiError::Failed("the metrics could not be found out".into()).into_response(),
    }
}

#[derive(Deserialize)]
struct TimelineQuery {
    vm: Option<String>,
    from: Option<u64>,
    to: Option<u64>,
    points: Option<usize>,
}

async fn timeline(
    State(app): Shared,
    Path(store): Path<String>,
    ApiQuery(asked): ApiQuery<TimelineQuery>,
) -> Response {
    let range = asked.from.unwrap_or(0)..=asked.to.unwrap_or(u64::MAX);
    let points = asked.points.unwrap_or(POINTS_MAX / 4);
    let question = move |source: &dyn DashboardSource| {
        Ok(Timeline::of(&*source.listing(&store)?, asked.vm.as_deref(), &range, points))
    };
    ask(&app, question).await
}

#[derive(Deserialize)]
struct ListQuery {
    vm: Option<String>,
    before: Option<u64>,
    limit: Option<usize>,
}

async fn checkpoints(
    State(app): Shared,
    Path(store): Path<String>,
    ApiQuery(asked): ApiQuery<ListQuery>,
) -> Response {
    let question = move |source: &dyn DashboardSource| {
        let listing = source.listing(&store)?;
        let limit = asked.limit.unwrap_or(LIST_DEFAULT).clamp(1, LIST_MAX);
        let newest_first = listing.checkpoints.iter().rev();
        let mut found = newest_first
            .filter(|one| asked.before.is_none_or(|before| one.id < before))
            .filter(|one| asked.vm.as_ref().is_none_or(|vm| one.vm == *vm));
        let all: Vec<_> = found.by_ref().take(limit).map(AsRef::as_ref).collect();
        // The number to continue before, if there are more.
        let next = found.next().and(all.last()).map(|last| last.id);
        Ok(json!({ "generation": listing.generation, "checkpoints": all, "next_before": next }))
    };
    ask(&app, question).await
}

async fn checkpoint(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(ask(&app, move |source| source.checkpoint(&store, id)).await)
}

#[derive(Deserialize)]
struct HeatQuery {
    pieces: Option<u64>,
}

async fn heat(
    State(app): Shared,
    at: CheckpointPath,
    ApiQuery(asked): ApiQuery<HeatQuery>,
) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    let pieces = asked.pieces.unwrap_or(PIECES_DEFAULT).clamp(1, PIECES_MAX);
    Ok(ask_slow(&app, move |source| source.heat(&store, id, pieces)).await)
}

async fn diff(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(ask_slow(&app, move |source| source.diff(&store, id)).await)
}

#[derive(Deserialize)]
struct ScreenQuery {
    member: Option<String>,
}

async fn screen(
    State(app): Shared,
    at: CheckpointPath,
    ApiQuery(asked): ApiQuery<ScreenQuery>,
) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    let question =
        move |source: &dyn DashboardSource| source.screen(&store, id, asked.member.as_deref());
    Ok(answer(&app, "image/png", with_slow_slot(&app, question).await?).await)
}

async fn growth(State(app): Shared, Path(store): Path<String>) -> Response {
    let question = move |source: &dyn DashboardSource| {
        let (listing, sizes) = (source.listing(&store)?, source.sizes(&store)?);
        let all = &listing.checkpoints;
        let (mut added_bytes, mut dirty_bytes, mut points) = (0, 0, Vec::new());
        for piece in chunks(all.len(), GROWTH_POINTS) {
            let last = piece.end - 1;
            for one in &all[piece] {
                added_bytes += one.added_bytes;
                dirty_bytes += one.dirty_pages * 4096 + one.disk_written_bytes;
            }
            let (id, at) = (all[last].id, &all[last].taken_at);
            points
                .push(json!({ "id": id, "at": at, "added_bytes": added_bytes, "dirty_bytes": dirty_bytes }));
        }
        Ok(json!({ "generation": listing.generation, "sizes": sizes, "points": points }))
    };
    ask(&app, question).await
}

async fn events(State(app): Shared) -> Response {
    let Some(receiver) = app.events.listen() else {
        return ApiError::Busy("too many clients listen already".into()).into_response();
    };
    let hello = LiveEvent { name: "hello", data: "{}".into() };
    let said = stream::unfold((Some(hello), receiver), |(first, mut receiver)| async move {
        let event = match first {
            Some(hello) => hello,
            None => match receiver.recv().await {
                Ok(event) => event,
                Err(RecvError::Lagged(_)) => LiveEvent { name: "reload", data: "{}".into() },
                Err(RecvError::Closed) => return None,
            },
        };
        let event = sse::Event::default().event(event.name).data(event.data);
        Some((Ok::<_, Infallible>(event), (None, receiver)))
    });
    Sse::new(said).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

async fn act(app: &Arc<App>, store: String, action: DashboardAction) -> Response {
    ask(app, move |source| Ok(json!({ "done": source.act(&store, &action)? }))).await
}

async fn pin(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(act(&app, store, DashboardAction::Pin(id)).await)
}

async fn unpin(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(act(&app, store, DashboardAction::Unpin(id)).await)
}

async fn rollback(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(act(&app, store, DashboardAction::Rollback(id)).await)
}

async fn branch(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(act(&app, store, DashboardAction::Branch(id)).await)
}

async fn restore(State(app): Shared, at: CheckpointPath) -> Result<Response, ApiError> {
    let (store, id) = checkpoint_path(at)?;
    Ok(act(&app, store, DashboardAction::Restore(id)).await)
}

async fn tag(
    State(app): Shared,
    at: Result<Path<(String, u64, String)>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path((store, id, tag)) = at.map_err(|e| ApiError::Bad(e.body_text()))?;
    Ok(act(&app, store, DashboardAction::Tag(id, tag)).await)
}

async fn untag(State(app): Shared, Path((store, tag)): Path<(String, String)>) -> Response {
    act(&app, store, DashboardAction::Untag(tag)).await
}
