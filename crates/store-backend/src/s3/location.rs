//! The location of an S3 store and the credentials for it, from its URL and the environment.
//!
//! ```text
//!   s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:9000&region=eu-central-1&lease=60
//!     endpoint   else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, Amazon's endpoint of the region
//!     region     else AWS_REGION, AWS_DEFAULT_REGION, us-east-1
//!     lease      seconds for which a lock holds unless it is renewed
//! ```
//!
//! Credentials are `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`. They are
//! not part of the URL, because messages show URLs. Profile files and roles of machines are not
//! supported.

use crate::{Error, Result};
use rusty_s3::{Bucket, Credentials, UrlStyle};
use std::io;
use std::path::Path;
use std::time::Duration;

const SCHEME: &str = "s3://";
const REGION: &str = "us-east-1";
const LEASE_S: u64 = 60;
/// A shorter lease would be renewed all the time; a longer one would lock others out for long after
/// the writer died.
const LEASE_S_BOUNDS: std::ops::RangeInclusive<u64> = 2..=3600;
const PREFIX_BYTES_MAX: usize = 512;

/// The location of a store in object storage.
#[derive(Clone)]
pub struct S3Location {
    /// The name in messages: `s3://BUCKET/PREFIX`.
    pub name: String,
    /// The prefix of all keys. Ends with `/` unless it is empty.
    pub prefix: String,
    pub endpoint: String,
    pub bucket: Bucket,
    pub credentials: Credentials,
    pub lease: Duration,
}

impl std::fmt::Debug for S3Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.name, self.endpoint)
    }
}

/// Returns true for the URL of a store in object storage.
pub fn is_url(path: &Path) -> bool {
    crate::backend::has_scheme(path, SCHEME)
}

impl S3Location {
    /// Parses the URL `path`. `environment` returns the values of environment variables. Errors:
    /// the URL is invalid; credentials are missing.
    pub fn parse(path: &Path, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let text = path.to_string_lossy();
        let refused = |problem: &str| invalid(&text, problem);
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| refused("not an s3:// URL"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (name, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_end_matches('/');
        if !is_bucket(name) {
            return Err(refused(
                "no valid bucket; a bucket has 3 to 63 lower-case letters, digits, dots or dashes, as \
                 in s3://BUCKET/PREFIX",
            ));
        }
        if !is_prefix(prefix) {
            return Err(refused(
                "no valid prefix; a prefix has letters, digits, dots, dashes or underscores, separated \
                 by single slashes",
            ));
        }
        let mut asked = UrlQuery::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            asked.take(pair).map_err(|problem| refused(&problem))?;
        }
        let variable =
            |names: &[&str]| names.iter().find_map(|n| environment(n)).filter(|v| !v.is_empty());
        let region = asked.region.or_else(|| variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let region = region.unwrap_or_else(|| REGION.into());
        let endpoint =
            asked.endpoint.or_else(|| variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        // Servers other than Amazon's do not expect the bucket in the host name.
        let own_host = endpoint.is_none() && !name.contains('.');
        let style = if own_host { UrlStyle::VirtualHost } else { UrlStyle::Path };
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let parsed = endpoint.parse().map_err(|e| refused(&format!("endpoint {endpoint}: {e}")))?;
        let bucket = Bucket::new(parsed, style, name.to_owned(), region)
            .map_err(|e| refused(&format!("endpoint {endpoint}: {e}")))?;
        Ok(Self {
            name: format!("{SCHEME}{place}").trim_end_matches('/').to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            endpoint,
            bucket,
            credentials: credentials(&text, environment)?,
            lease: Duration::from_secs(asked.lease_s.unwrap_or(LEASE_S)),
        })
    }
}

/// The parameters in the query of a URL.
#[derive(Default)]
struct UrlQuery {
    endpoint: Option<String>,
    region: Option<String>,
    lease_s: Option<u64>,
}

impl UrlQuery {
    fn take(&mut self, pair: &str) -> Result<(), String> {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "endpoint" => self.endpoint = Some(value.to_owned()),
            "region" => self.region = Some(value.to_owned()),
            "lease" => {
                let lease_s = value.parse().ok().filter(|s| LEASE_S_BOUNDS.contains(s));
                self.lease_s = Some(lease_s.ok_or("the lease must be 2 to 3600 seconds")?);
            }
            _ => {
                return Err(format!(
                    "unknown parameter {name:?}; known are endpoint, region and lease"
                ));
            }
        }
        Ok(())
    }
}

fn credentials(object: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Credentials> {
    let variable = |name| environment(name).filter(|value| !value.is_empty());
    match (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
        (Some(key), Some(secret)) => Ok(match variable("AWS_SESSION_TOKEN") {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        }),
        _ => {
            Err(invalid(object, "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"))
        }
    }
}

fn is_bucket(name: &str) -> bool {
    let fits = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'.' || c == b'-';
    (3..=63).contains(&name.len()) && name.bytes().all(fits) && !name.contains("..")
}

fn is_prefix(prefix: &str) -> bool {
    let fits = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    let is_name =
        |part: &str| !part.is_empty() && part.bytes().all(fits) && part != "." && part != "..";
    prefix.len() <= PREFIX_BYTES_MAX && (prefix.is_empty() || prefix.split('/').all(is_name))
}

fn invalid(object: &str, problem: &str) -> Error {
    Error::Io {
        object: object.into(),
        operation: "parse the URL",
        source: io::Error::new(io::ErrorKind::InvalidInput, problem.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(url: &str, variables: &[(&str, &str)]) -> Result<S3Location> {
        let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "hidden")];
        let all: Vec<_> = keys.iter().chain(variables).collect();
        let of =
            |name: &str| all.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        S3Location::parse(Path::new(url), &of)
    }

    #[test]
    fn the_url_goes_before_the_environment_and_that_before_amazon() {
        let amazon = parse("s3://bucket/a/b/", &[]).unwrap();
        assert_eq!((amazon.name.as_str(), amazon.prefix.as_str()), ("s3://bucket/a/b", "a/b/"));
        assert_eq!(
            amazon.bucket.object_url("k").as_str(),
            "https://bucket.s3.us-east-1.amazonaws.com/k"
        );
        let environment =
            [("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"), ("AWS_REGION", "eu-west-1")];
        let own = parse("s3://bucket", &environment).unwrap();
        assert_eq!(own.bucket.object_url("k").as_str(), "http://127.0.0.1:9000/bucket/k");
        assert_eq!((own.bucket.region(), own.prefix.as_str()), ("eu-west-1", ""));
        let asked =
            parse("s3://bucket/p?endpoint=http://[::1]:1&region=x&lease=9", &environment).unwrap();
        assert_eq!(asked.bucket.object_url("k").as_str(), "http://[::1]:1/bucket/k");
        assert_eq!((asked.bucket.region(), asked.lease), ("x", Duration::from_secs(9)));
        assert!(!format!("{asked:?}").contains("hidden"));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_reason() {
        for (url, reason) in [
            ("s3://", "bucket"),
            ("s3://Bucket/p", "bucket"),
            ("s3://bucket/a/../b", "prefix"),
            ("s3://bucket/a//b", "prefix"),
            ("s3://bucket/p?lease=0", "lease"),
            ("s3://bucket/p?speed=9", "speed"),
            ("s3://bucket/p?endpoint=ftp://x", "endpoint"),
        ] {
            let error = parse(url, &[]).unwrap_err();
            let Error::Io { object, source, .. } = &error else { panic!("{error}") };
            assert_eq!(object, url);
            assert!(source.to_string().contains(reason), "{url}: {error}");
        }
        let error = parse("s3://bucket", &[("AWS_SECRET_ACCESS_KEY", "")]).unwrap_err();
        assert!(error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_urls_never_panic(rest in "\\PC{0,80}") {
            let _ = parse(&format!("s3://{rest}"), &[]);
        }
    }
}
