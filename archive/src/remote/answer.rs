//! Records the HTTP status and the error code of the last response to a request.
//!
//! The errors of `object_store` are insufficient: they report a conflict as an existing object, and a missing bucket as
//! a missing object. They also quote the server's message, which may repeat parts of a credential. This module wraps
//! the HTTP client of `object_store`, records the status and the code, and drops the message.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;

use async_trait::async_trait;
use futures_util::StreamExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};

use crate::bucket::FailureClass;

/// Maximum number of bytes of an error message that are read.
const MESSAGE_LEN_MAX: usize = 64 << 10;
/// Maximum length of an error code in bytes.
const CODE_LEN_MAX: usize = 64;

tokio::task_local! {
    static LAST: RefCell<Option<Answer>>;
}

/// An HTTP status other than success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub status: u16,
    /// The error code of the server, such as `SlowDown`, or an empty string.
    pub code: String,
    pub class: FailureClass,
}

impl Answer {
    pub fn new(status: u16, code: &str, message: &str) -> Self {
        Self { status, code: code.to_owned(), class: classify(status, code, message) }
    }

    /// Returns true if the bucket itself does not exist.
    pub fn is_absent_bucket(&self) -> bool {
        ["NoSuchBucket", "ContainerNotFound", "FilesystemNotFound", "ResourceNotFound"]
            .contains(&self.code.as_str())
    }

    /// Returns true if a create was refused although the object may not exist, for example because of a conflict.
    pub fn is_conflict(&self) -> bool {
        const CODES: [&str; 6] = [
            "ConditionalRequestConflict",
            "OperationAborted",
            "ContainerBeingDeleted",
            "ContainerDisabled",
            "AccountIsDisabled",
            "AccountBeingCreated",
        ];
        self.status == 409 && CODES.contains(&self.code.as_str())
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HTTP status {}", self.status)?;
        if self.code.is_empty() { Ok(()) } else { write!(f, ", {}", self.code) }
    }
}

/// Runs a request. Returns its result, and the last response if that response reports a failure.
pub(super) async fn observe<T>(request: impl Future<Output = T>) -> (T, Option<Answer>) {
    let observed = async {
        let result = request.await;
        (result, LAST.with(|last| last.borrow_mut().take()))
    };
    LAST.scope(RefCell::new(None), observed).await
}

fn remember(answer: Option<Answer>) {
    // `object_store` sends all requests from the task of its caller, so this code runs within `observe`.
    let _ = LAST.try_with(|last| *last.borrow_mut() = answer);
}

/// Returns the failure class for an HTTP status, an error code and a message.
fn classify(status: u16, code: &str, message: &str) -> FailureClass {
    let message = message.to_ascii_lowercase();
    let is_refusal = matches!(status, 400 | 401 | 403);
    let is_expired = ["expired", "not valid in the specified time frame", "lifetime validation failed"];
    match (status, code) {
        (_, "RequestTimeTooSkewed" | "RequestInTheFuture") => FailureClass::ClockSkew,
        (401 | 403, "AuthenticationFailed") if message.contains("date header") => FailureClass::ClockSkew,
        (_, "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "invalid_grant") => {
            FailureClass::Expired
        }
        _ if is_refusal && is_expired.iter().any(|text| message.contains(text)) => FailureClass::Expired,
        (507, _) | (_, "QuotaExceeded" | "XMinioStorageFull" | "InsufficientStorage" | "quotaExceeded") => {
            FailureClass::Full
        }
        (
            _,
            "SlowDown" | "ServerBusy" | "TooManyRequests" | "rateLimitExceeded" | "userRateLimitExceeded",
        ) => FailureClass::Throttled,
        (_, "Throttling" | "ThrottlingException" | "RequestLimitExceeded") | (429, _) => {
            FailureClass::Throttled
        }
        (401 | 403, _) => FailureClass::Denied,
        (501 | 405, _) => FailureClass::NotSupported,
        (_, "RequestTimeout" | "ConditionalRequestConflict" | "OperationAborted") => FailureClass::InDoubt,
        (408 | 500 | 502 | 503 | 504, _) => FailureClass::InDoubt,
        _ => FailureClass::Other,
    }
}

/// Returns the error code in an XML or JSON message, or an empty string.
fn code_in(message: &str) -> &str {
    const FIELDS: [&str; 5] = ["<Code>", "\"reason\": \"", "\"reason\":\"", "\"error\":\"", "\"error\": \""];
    let code = FIELDS.iter().find_map(|field| message.split_once(field)).map_or("", |(_, rest)| rest);
    let end = code.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(code.len());
    if end > CODE_LEN_MAX { "" } else { &code[..end] }
}

/// Creates HTTP clients that record the responses.
#[derive(Debug, Default)]
pub(super) struct ObservedConnector(ReqwestConnector);

impl HttpConnector for ObservedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(ObservedService(self.0.connect(options)?)))
    }
}

#[derive(Debug)]
struct ObservedService(HttpClient);

#[async_trait]
impl HttpService for ObservedService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        remember(None);
        let response = self.0.execute(request).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let message = read_message(body).await;
        let header = parts.headers.get("x-ms-error-code").and_then(|code| code.to_str().ok());
        let code = header.map_or_else(|| code_in(&message), code_in_header).to_owned();
        remember(Some(Answer::new(status.as_u16(), &code, &message)));
        // Only the code is returned, so that neither errors nor logs of `object_store` contain the server's message.
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(code)))
    }
}

fn code_in_header(code: &str) -> &str {
    let is_code = code.len() <= CODE_LEN_MAX && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_code { code } else { "" }
}

/// Reads the first bytes of an error message. Ignores read errors, because the status is valid even if the message is
/// incomplete.
async fn read_message(body: HttpResponseBody) -> String {
    let mut stream = body.bytes_stream();
    let mut message = Vec::new();
    while let Some(Ok(piece)) = stream.next().await {
        let room = MESSAGE_LEN_MAX - message.len();
        message.extend_from_slice(&piece[..piece.len().min(room)]);
        if message.len() == MESSAGE_LEN_MAX {
            break;
        }
    }
    String::from_utf8_lossy(&message).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_statuses_are_classified() {
        let table = [
            (400, "ExpiredToken", "The provided token has expired.", FailureClass::Expired),
            (400, "InvalidRequest", "", FailureClass::Other),
            (400, "RequestTimeout", "", FailureClass::InDoubt),
            (401, "", "", FailureClass::Denied),
            (
                401,
                "InvalidAuthenticationInfo",
                "Lifetime validation failed. The token is expired.",
                FailureClass::Expired,
            ),
            (403, "AccessDenied", "Access Denied", FailureClass::Denied),
            (403, "AccessDenied", "Request has expired", FailureClass::Expired),
            (
                403,
                "AuthenticationFailed",
                "Signature not valid in the specified time frame",
                FailureClass::Expired,
            ),
            (
                403,
                "AuthenticationFailed",
                "The Date header in the request is incorrect",
                FailureClass::ClockSkew,
            ),
            (403, "InvalidAccessKeyId", "", FailureClass::Denied),
            (403, "RequestTimeTooSkewed", "", FailureClass::ClockSkew),
            (403, "QuotaExceeded", "", FailureClass::Full),
            (404, "NoSuchBucket", "", FailureClass::Other),
            (405, "MethodNotAllowed", "", FailureClass::NotSupported),
            (408, "", "", FailureClass::InDoubt),
            (409, "ConditionalRequestConflict", "", FailureClass::InDoubt),
            (412, "PreconditionFailed", "", FailureClass::Other),
            (429, "", "", FailureClass::Throttled),
            (500, "InternalError", "", FailureClass::InDoubt),
            (501, "NotImplemented", "", FailureClass::NotSupported),
            (502, "", "", FailureClass::InDoubt),
            (503, "SlowDown", "", FailureClass::Throttled),
            (503, "ServerBusy", "", FailureClass::Throttled),
            (503, "ServiceUnavailable", "", FailureClass::InDoubt),
            (504, "", "", FailureClass::InDoubt),
            (507, "", "", FailureClass::Full),
            (507, "XMinioStorageFull", "", FailureClass::Full),
        ];
        for (status, code, message, class) in table {
            assert_eq!(classify(status, code, message), class, "{status} {code} {message}");
        }
    }

    #[test]
    fn codes_are_short_and_plain() {
        assert_eq!(code_in("<Error><Code>SlowDown</Code><Message>Reduce</Message></Error>"), "SlowDown");
        assert_eq!(code_in(r#"{"error":{"errors":[{"reason": "quotaExceeded"}]}}"#), "quotaExceeded");
        assert_eq!(code_in(r#"{"error":"invalid_grant","error_description":"x"}"#), "invalid_grant");
        assert_eq!(code_in("<Code>no such/thing"), "no");
        assert_eq!(code_in(&format!("<Code>{}</Code>", "a".repeat(65))), "");
        assert_eq!(code_in("<html>Bad gateway</html>"), "");
    }
}
