"""The server answers only its own page on this machine; tested over raw HTTP."""

import http.client
import json
from urllib.parse import urlsplit

import pytest


@pytest.fixture
def request_(address):
    """Sends a request with exactly these headers; returns the status and headers of the response."""
    host, port = urlsplit(address).hostname, urlsplit(address).port

    def send(method="GET", path="/", body=None, **headers):
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": f"{host}:{port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent["Content-Length"] = str(len(body))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        response.read()
        return response.status, response.headers

    return send


JOIN = "/gradio_api/queue/join"
BODY = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()


def test_the_page_is_served_with_its_policy(request_):
    status, headers = request_()
    assert status == 200
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "http:" not in policy and "*" not in policy


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", ""])
def test_a_foreign_host_is_refused(request_, host):
    assert request_(Host=host)[0] == 400
    assert request_("POST", JOIN, BODY, Host=host, Content_Type="text/plain")[0] == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_what_another_sites_page_sends_is_refused(request_, headers):
    for method, path, body in (("POST", JOIN, BODY), ("GET", "/config", None), ("POST", "/gradio_api/upload", b"x")):
        assert request_(method, path, body, Content_Type="text/plain", **headers)[0] == 403


def test_a_link_from_elsewhere_may_lead_to_the_page_and_to_nothing_else(request_):
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert request_(**link)[0] == 200
    assert request_(path="/config", **link)[0] == 403
    assert request_(**link | {"Sec_Fetch_Dest": "iframe"})[0] == 403
    assert request_("POST", "/", b"", **link)[0] == 403


def test_the_page_itself_is_not_refused(request_, address):
    own = {"Origin": address.rstrip("/"), "Sec_Fetch_Site": "same-origin"}
    assert request_("POST", JOIN, b"{}", Content_Type="application/json", **own)[0] == 422  # accepted, but empty


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/monitoring", "/gradio_api/mcp"])
def test_nothing_else_is_offered(request_, path):
    assert request_(path=path)[0] in (403, 404)


@pytest.mark.parametrize("path", ["/etc/passwd", "/work", "//etc/passwd"])
def test_no_file_of_the_machine_is_served(request_, path):
    assert request_(path=f"/gradio_api/file={path}")[0] in (403, 404)
