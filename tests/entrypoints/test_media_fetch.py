# SPDX-License-Identifier: Apache-2.0
"""Media URLs lead to public addresses, in bounded time and size (DESIGN.md section 9)."""

import gzip
import ipaddress
import ssl
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.web import Names, answer, endless, in_turn, moved, site
from vllm_omni.entrypoints.openai.addresses import AddressPolicy
from vllm_omni.entrypoints.openai.media import OmniMediaConnector
from vllm_omni.entrypoints.openai.media_budget import (
    FetchedTooMuchError,
    MediaBudget,
    MediaBudgetMiddleware,
)
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings, GuardedConnection
from vllm_omni.errors import OmniClientError
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

PNG = media.encode_image(media.image(16, 16))
HERE = AddressPolicy([ipaddress.ip_network("127.0.0.1/32")])
LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def connector(
    names: Names | None = None, policy: AddressPolicy = HERE, **kwargs: Any
) -> OmniMediaConnector:
    fetch = FetchSettings(policy, resolver=names or Names(media=["127.0.0.1"]))
    return OmniMediaConnector(settings=fetch, **kwargs)


async def fetched(url: str, it: OmniMediaConnector | None = None) -> tuple[int, int]:
    return (await (it or connector()).fetch_image_async(url)).media.size


async def refused(url: str, it: OmniMediaConnector | None = None, status: int = 422) -> str:
    with pytest.raises(OmniClientError) as caught:
        await fetched(url, it)
    assert (caught.value.status_code, caught.value.param) == (status, "messages")
    assert "sig=" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::8.8.8.8", True),
        ("2002:808:808::1", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("10.1.2.3", False),
        ("172.31.0.1", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("0.0.0.0", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("224.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b:1::8.8.8.8", False),
        ("2002:7f00:1::", False),
        ("2002:a9fe:a9fe::1", False),
        ("2001:0:808:808::1", False),
        ("2001:db8::1", False),
    ],
)
def test_public_addresses(host: str, public: bool) -> None:
    assert AddressPolicy().allows(host) == public


def test_networks_open_what_they_hold_in_every_form() -> None:
    policy = AddressPolicy([ipaddress.ip_network("10.1.0.0/16")])
    assert all(map(policy.allows, ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "8.8.8.8")))
    assert not any(map(policy.allows, ("10.2.0.1", "127.0.0.1")))


def test_named_hosts_may_be_private_but_no_metadata_service() -> None:
    policy = AddressPolicy(named_hosts=True)
    assert all(map(policy.allows, ("10.1.2.3", "127.0.0.1", "::1", "fd00::1", "8.8.8.8")))
    metadata = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "fe80::1")
    assert not any(map(policy.allows, metadata))


async def test_a_name_is_judged_by_its_address() -> None:
    async with site(x=answer(PNG)) as web:
        url = f"http://media.example:{web.port}/x?sig=1"
        assert await fetched(url) == (16, 16)
        assert "not a public" in await refused(url, connector(policy=AddressPolicy()))
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0"):
            await refused(f"http://{host}:{web.port}/x", OmniMediaConnector())
        assert len(web.requests) == 1


async def test_a_name_that_changes_its_mind() -> None:
    """DNS rebinding: what is connected to is what was checked, each time anew."""
    async with site(x=answer(PNG), back=moved("/x")) as web:
        names = Names(media=["127.0.0.1", "127.0.0.2"])
        url = f"http://media.example:{web.port}/back"
        assert "not a public" in await refused(url, connector(names))
        assert names.asked == ["media.example"] * 2
        assert [path for path, _ in web.requests] == ["/back"]


async def test_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(
        x=answer(PNG),
        here=moved("/x"),
        away=moved("http://inner.example/x"),
        file=moved("file:///etc/passwd"),
        round=moved("/round"),
        junk=moved("http://[::"),
    ) as web:
        names = Names(media=["127.0.0.1"], inner=["10.0.0.1"])
        root = f"http://media.example:{web.port}"
        assert await fetched(f"{root}/here") == (16, 16)
        assert "not a public" in await refused(f"{root}/away", connector(names))
        assert "no http" in await refused(f"{root}/file")
        assert "more than 5" in await refused(f"{root}/round")
        assert "no URL" in await refused(f"{root}/junk")
        monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        assert "it redirects" in await refused(f"{root}/here")


async def test_allowed_domains_hold_for_every_hop() -> None:
    async with site(x=answer(PNG), away=moved("http://other.example/x")) as web:
        named = {"allowed_media_domains": ["media.example"], "policy": AddressPolicy()}
        names = Names(media=["127.0.0.1"], other=["8.8.8.8"], link=["169.254.169.254"])
        root = f"http://media.example:{web.port}"
        assert await fetched(f"{root}/x", connector(names, **named)) == (16, 16)
        assert "allowed domains" in await refused(f"{root}/away", connector(names, **named))
        message = await refused("http://other.example/x", connector(names, **named), 400)
        assert "allowed domains" in message
        named["allowed_media_domains"] = ["link.example"]
        assert "not a public" in await refused("http://link.example/", connector(names, **named))


async def test_size_is_checked_while_it_comes() -> None:
    sent: list[int] = []
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < LIMIT / 8
    async with site(
        declared=answer(bytes(LIMIT + 1)),
        endless=endless(bytes(64 << 10), 0, sent),
        bomb=answer(bomb, content_encoding="gzip"),
        packed=answer(gzip.compress(PNG), content_encoding="gzip"),
        deflated=answer(zlib.compress(PNG), content_encoding="deflate"),
        cut=answer(gzip.compress(PNG)[:-9], content_encoding="gzip"),
        brotli=answer(PNG, content_encoding="br"),
    ) as web:
        root = f"http://media.example:{web.port}"
        for path in ("declared", "endless", "bomb"):
            assert f"larger than {LIMIT}" in await refused(f"{root}/{path}")
        assert sum(sent) < 32 * LIMIT  # the kernel's buffers, and no more
        for path in ("packed", "deflated"):
            assert await fetched(f"{root}/{path}") == (16, 16)
        assert "cut short" in await refused(f"{root}/cut")
        assert "encoding" in await refused(f"{root}/brotli")


async def test_time_is_that_of_everything_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")
    async with site(drip=endless(b"x", 0.05, []), down=answer(status=503)) as web:
        began = time.monotonic()
        assert "longer than 1 s" in await refused(f"http://media.example:{web.port}/drip")
        assert "answered 503" in await refused(f"http://media.example:{web.port}/down")
        assert time.monotonic() - began < 3


async def test_only_what_may_pass_is_tried_again() -> None:
    async with site(down=in_turn(answer(status=503), answer(PNG)), gone=answer(status=404)) as web:
        root = f"http://media.example:{web.port}"
        assert await fetched(f"{root}/down") == (16, 16)
        assert "answered 404" in await refused(f"{root}/gone")
        assert len(web.requests) == 3
        names = Names(media=["127.0.0.1"])
        await refused("http://nobody.example/", connector(names))
        assert len(names.asked) == 3


async def test_nothing_is_kept_or_given_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine media.example login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with site(x=answer(PNG, set_cookie="a=b; Path=/")) as web:
        it = connector()
        for _ in range(2):
            await fetched(f"http://media.example:{web.port}/x", it)
        for _, headers in web.requests:
            assert not {"cookie", "authorization", "referer"} & headers.keys()


async def test_tls_checks_the_certificate(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    subject = ["-subj", "/CN=other.example", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with site(ssl=context, x=answer(PNG)) as web:
        assert "certificate" in await refused(f"https://media.example:{web.port}/x")
        assert web.requests == []


async def test_a_proxy_connects_but_addresses_are_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(**{"http://media.example/x": answer(PNG)}) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert await fetched("http://media.example/x", OmniMediaConnector()) == (16, 16)
        assert "not a public" in await refused("http://169.254.169.254/x", OmniMediaConnector())
        monkeypatch.setenv("no_proxy", "localhost")
        await refused(f"http://localhost:{proxy.port}/x", OmniMediaConnector())
        assert len(proxy.requests) == 1


async def test_count_is_that_of_a_request() -> None:
    """The connectors of one request, one per message, share what it may bring."""
    seen: list[str] = []
    url = media.data_url(PNG, "png")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            await fetched(url, connector())
        seen.append(await refused(url, connector(), 400))

    for _ in range(2):
        await MediaBudgetMiddleware(app, max_media=2)({"type": "http"}, None, None)
    assert len(seen) == 2
    assert "--max-media-per-request" in seen[0]


async def test_files_stay_closed_and_untold(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "x.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "open" / "link.png").symlink_to(tmp_path / "secret.png")
    inside = f"file://{tmp_path}/open/x.png"
    assert "not allowed" in await refused(inside, status=400)

    def opened() -> OmniMediaConnector:
        return connector(allowed_local_media_path=str(tmp_path / "open"))

    assert await fetched(inside, opened()) == (16, 16)
    for name in ("secret.png", "open/../secret.png", "open/link.png", "open", "open/nothing.png"):
        message = await refused(f"file://{tmp_path}/{name}", opened(), 400)
        assert str(tmp_path) not in message
    await refused("file:///dev/zero", opened(), 400)


async def test_bytes_are_those_of_a_request() -> None:
    async with site(x=answer(PNG)) as web:
        budget = MediaBudget(fetched_bytes=2 * len(PNG))
        fetch = GuardedConnection(FetchSettings(HERE), budget)
        url = f"http://127.0.0.1:{web.port}/x"
        for _ in range(2):
            assert await fetch.async_get_bytes(url) == PNG
        with pytest.raises(FetchedTooMuchError):
            await fetch.async_get_bytes(url)
