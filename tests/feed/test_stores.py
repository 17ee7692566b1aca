"""Stores: opened by URL, asked in a process of their own, and silent about credentials whatever goes wrong."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import traceback

import pytest
from server import Faults, Server

from salience.errors import ConfigError, DataError, MissingExtra, SalienceError, StoreError
from salience.feed import Source, isolated
from salience.feed.stores import LocalStore, open_store, shown

SECRET = "hunter2-not-for-anyone"


@pytest.fixture
def folder(tmp_path):
    for name in ("b/2.bin", "a/1.bin", "a/deep/3.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize("form", [str, lambda p: p.as_uri(), lambda p: p])
def test_a_folder_opens_as_path_and_as_url(folder, form):
    store = open_store(form(folder))
    assert [path for path, _ in store.list()] == ["a/1.bin", "a/deep/3.bin", "b/2.bin"]
    assert store.sizes(["a/1.bin", "nothing"]) == [7, None]
    assert (store.get("b/2.bin"), store.get("nothing")) == (b"b/2.bin", None)


def test_links_are_followed_but_not_in_circles(folder):
    (folder / "c").symlink_to(folder / "b")
    (folder / "a" / "round").symlink_to(folder)
    assert [path for path, _ in open_store(folder).list()] == ["a/1.bin", "a/deep/3.bin", "b/2.bin", "c/2.bin"]
    (folder / "c" / "lost").symlink_to(folder / "nothing")
    with pytest.raises(DataError, match="link that leads nowhere"):
        open_store(folder).list()


def test_a_folder_needs_no_other_package(folder, monkeypatch):
    for name in ("obstore", "obstore.store", "xxhash"):
        monkeypatch.setitem(sys.modules, name, None)
    assert Source(folder).read([0]) == [b"a/1.bin"]
    with pytest.raises(MissingExtra, match=r"pip install 'salience\[feed\]'"):
        Source("https://example.invalid/x")


def test_an_unknown_scheme_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown scheme 'htps'.*Did you mean 'https'"):
        open_store("htps://host/x")


def test_a_url_without_bucket_is_refused():
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store("s3:///x")


def test_http_objects_are_asked_for_size_and_content():
    with Server({"x/a.bin": b"12345"}) as server:
        store = open_store(server.url + "/x")
        assert store.sizes(["a.bin", "b.bin"]) == [5, None]
        assert (store.get("a.bin"), store.get("b.bin")) == (b"12345", None)
        assert isolated._user != os.getpid()  # so that workers can still be forked
        with pytest.raises(StoreError, match=r"cannot be listed.*salience pack"):
            store.list()


def test_asking_survives_errors():
    with Server({"a": b"12345"}, Faults(errors=0.6, seed=3)) as server:
        assert open_store(server.url).get("a") == b"12345"
        assert server.hurt["errors"] > 0


def test_a_store_travels_to_other_processes_unopened():
    store = pickle.loads(pickle.dumps(open_store("https://example.invalid/x")))
    assert store.url == "https://example.invalid/x"
    assert store._opened is None


def test_what_may_be_secret_is_not_shown():
    assert shown("https://me:pw@host/p?sig=1#x") == "https://host/p"
    assert shown("s4://me:p@w@bucket/p") == "s4://bucket/p"
    assert shown("plain/folder") == "plain/folder"


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{SECRET}@127.0.0.1:9/x",
        f"s4://me:{SECRET}@bucket/x",
        f"https://127.0.0.1:9/x?sig={SECRET}",
        f"az://me:{SECRET}@container/x",
        "s3://bucket/prefix",
        "gs://bucket/prefix",
        "az://container/prefix",
    ],
)
@pytest.mark.parametrize("configured", [True, False])
def test_no_error_tells_a_secret(url, configured, monkeypatch, caplog, capfd):
    """The stores are sent to a port where nobody answers, or to a metadata service that does not exist."""
    caplog.set_level(logging.DEBUG)
    nobody = "http://127.0.0.1:9"
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    if configured:
        settings = {
            "AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SECRET,
            "AWS_ENDPOINT_URL": nobody, "AWS_REGION": "x", "GOOGLE_SERVICE_ACCOUNT_KEY": SECRET,
            "AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
            "AZURE_STORAGE_ENDPOINT": nobody, "AZURE_ALLOW_HTTP": "true",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SalienceError) as caught:
        Source(url, retries=0, deadline=5)
    text = "".join(traceback.format_exception(caught.value))
    assert str(caught.value).count("\n") == 0
    assert SECRET not in text + caplog.text + "".join(capfd.readouterr())


def test_missing_credentials_are_told_with_the_variables_to_set(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="no credentials were found; set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/x").list()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x"])
def test_a_path_that_leads_outside_is_not_read(folder, path):
    with pytest.raises(SalienceError, match="leads outside"):
        LocalStore(str(folder / "a")).get(path)


def test_google_storage_is_listed_and_read(tmp_path, monkeypatch):
    with Server({f"bucket/set/c{i % 2}/{i}.bin": bytes([i]) * 50 for i in range(6)}) as server:
        account = {
            "gcs_base_url": server.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        source = Source("gs://bucket/set")
        assert source.classes == ("c0", "c1")
        assert [data[:1] for data in source.read(range(6))] == [bytes([i]) for i in (0, 2, 4, 1, 3, 5)]
