//! Which requests are answered: those that only read, and that name this host. Pure.
//!
//! A page of somebody else's can have a browser send requests to an address of this host, under a name that this somebody chose (DNS
//! rebinding). The browser then takes the answer for that page's own. The header `Host` tells such a request.

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use std::net::IpAddr;

/// Names of this host that need no option.
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Names under which the page may be asked for.
#[derive(Clone, Debug)]
pub struct Hosts {
    names: Vec<String>,
    /// Whether any address is one of them. An address in `Host` is the one that the browser was told to connect to, so it is no chosen name.
    has_any_address: bool,
}

impl Hosts {
    /// Returns those of a page that listens at `addresses`, and may also be called by `names`.
    #[must_use]
    pub fn new(addresses: &[IpAddr], names: &[String]) -> Self {
        let own = NAMES.iter().map(|name| (*name).to_owned());
        let has_any_address = addresses.iter().any(IpAddr::is_unspecified);
        let addresses = addresses.iter().filter(|address| !address.is_unspecified()).map(IpAddr::to_string);
        let names = own.chain(addresses).chain(names.iter().map(|name| name.to_ascii_lowercase())).collect();
        Self { names, has_any_address }
    }

    fn has(&self, authority: &str) -> bool {
        let name = name_of(authority).to_ascii_lowercase();
        let is_address = || name.parse().is_ok_and(|address: IpAddr| !address.is_unspecified());
        self.names.iter().any(|host| *host == name.trim_end_matches('.')) || self.has_any_address && is_address()
    }
}

/// Returns the name or address in `NAME:PORT`. The port may be that of a tunnel.
fn name_of(authority: &str) -> &str {
    if let Some(rest) = authority.strip_prefix('[') {
        return rest.split_once(']').map_or(rest, |(address, _)| address);
    }
    authority.rsplit_once(':').map_or(authority, |(name, _)| name)
}

/// Returns why a request is not answered, or `None` if it is.
pub fn refusal(method: &Method, uri: &Uri, headers: &HeaderMap, hosts: &Hosts) -> Option<(StatusCode, String)> {
    let named: Vec<&HeaderValue> = headers.get_all(header::HOST).iter().collect();
    let names: Vec<&str> = named.iter().filter_map(|name| name.to_str().ok()).collect();
    if names.len() != 1 || named.len() != 1 {
        return Some((StatusCode::BAD_REQUEST, "a request names one host, in one header `Host`\n".into()));
    }
    let authority = uri.authority().map(|authority| authority.as_str());
    if let Some(name) = names.into_iter().chain(authority).find(|name| !hosts.has(name)) {
        // It is the client's own text; no other client gets it.
        let name: String = name.chars().filter(char::is_ascii_graphic).take(100).collect();
        let text = format!(
            "this page is not called `{name}`: ask for it as 127.0.0.1 or localhost, or start `remoca web` with --host and that name\n"
        );
        return Some((StatusCode::MISDIRECTED_REQUEST, text));
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return Some((StatusCode::METHOD_NOT_ALLOWED, "this page only reads: GET and HEAD are allowed\n".into()));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(method: Method, uri: &str, hosts: &[&str]) -> Option<u16> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_bytes(host.as_bytes()).expect("a value"));
        }
        let own = Hosts::new(&["10.0.0.7".parse().expect("an address")], &["Page.example".into()]);
        refusal(&method, &uri.parse().expect("a URI"), &headers, &own).map(|(status, _)| status.as_u16())
    }

    #[test]
    fn a_request_has_to_name_this_host() {
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:9170", "[::1]:9170", "10.0.0.7", "page.example:1", "localhost."]
        {
            assert_eq!(told(Method::GET, "/", &[host]), None, "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil:9170",
            "",
            "[::2]:9170",
            "evil@localhost",
            "localhost:80:x",
        ] {
            assert_eq!(told(Method::GET, "/", &[host]), Some(421), "{host}");
        }
        assert_eq!(told(Method::GET, "/", &[]), Some(400));
        assert_eq!(told(Method::GET, "/", &["localhost", "evil"]), Some(400));
        assert_eq!(told(Method::GET, "/", &["\u{e4}"]), Some(400));
        assert_eq!(told(Method::GET, "http://evil.example/", &["localhost"]), Some(421));
    }

    #[test]
    fn a_request_only_reads() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS, Method::CONNECT, Method::TRACE] {
            assert_eq!(told(method.clone(), "/", &["localhost"]), Some(405), "{method}");
        }
        assert_eq!(told(Method::HEAD, "/", &["localhost"]), None);
    }

    #[test]
    fn a_page_at_every_address_is_called_by_all_of_them_and_not_by_all_names() {
        for every in ["0.0.0.0", "::"] {
            let hosts = Hosts::new(&[every.parse().expect("an address")], &[]);
            assert!(hosts.has("localhost") && hosts.has("10.0.0.7:9170") && hosts.has("[fd00::7]:9170"));
            for name in ["0.0.0.0:9170", "[::]:9170", "evil.example:9170", "10.0.0.7.evil.example"] {
                assert!(!hosts.has(name), "{name}");
            }
        }
    }
}
