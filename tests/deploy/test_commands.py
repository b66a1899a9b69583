"""The command lines and environments that `baton up` derives from its settings."""

import pytest

from deploy.cluster.cluster import store_bytes
from deploy.commands import (
    default_threads,
    proxy_command,
    server_argv,
    server_command,
    server_commands,
    store_command,
    uses_store,
)
from protocol.settings.settings import (
    DecodeSettings,
    PrefillSettings,
    ProxySettings,
    ServeSettings,
    StoreSettings,
    UpSettings,
    load,
)


def up_settings(*argv: str) -> UpSettings:
    return load(UpSettings, argv)


def test_each_server_gets_a_name_and_the_secret_by_environment():
    settings = up_settings("--prefill.count=2", "--decode.count", "1")
    values = server_commands(settings, secret="s" * 16, cores=8)
    assert [command.name for command in values] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    for command in values:
        assert command.env == {"BATON_CLUSTER_SECRET": "s" * 16}
        assert "s" * 16 not in " ".join(command.argv)


def test_keys_are_passed_by_environment_and_the_proxy_has_a_separate_key():
    client, admin, proxy_key = "client-key-1", "admin-key-12", "the-proxy's-own"
    settings = up_settings(
        f"--api-key={client}", f"--admin-key={admin}", "--tls-cert=c", "--tls-key=k"
    )
    urls = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
    proxy = proxy_command(settings, urls, "s" * 16, proxy_key)
    assert proxy.env == {
        "BATON_API_KEY": client,
        # The launcher calls the proxy with the proxy's own key.
        "BATON_ADMIN_KEY": f"{admin},{proxy_key}",
        "BATON_UPSTREAM_API_KEY": proxy_key,
        "BATON_CLUSTER_SECRET": "s" * 16,
    }
    for server in server_commands(settings, secret="s" * 16, cores=8, key=proxy_key):
        assert server.env["BATON_ADMIN_KEY"] == f"{proxy_key},{admin}"
        assert not any(
            key in " ".join(server.argv) for key in (client, admin, proxy_key, "tls")
        )
    words = " ".join(proxy.argv)
    assert "--tls-cert=c --tls-key=k" in words
    assert not any(key in words for key in (client, admin, proxy_key))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (None, None)),
        (["--speculate=ngram:4"], ("ngram:4", "ngram:4")),
        (["--speculate=ngram:4", "--prefill.speculate=off"], ("off", "ngram:4")),
        (["--decode.speculate=ngram:2"], (None, "ngram:2")),
    ],
)
def test_speculation_of_the_cluster_is_that_of_servers_without_their_own(
    argv, expected
):
    settings = up_settings(*argv)
    servers = [
        load(server_class, server_argv(settings, kind, cores=8))
        for kind, server_class in (
            ("prefill", PrefillSettings),
            ("decode", DecodeSettings),
        )
    ]
    assert tuple(server.speculate for server in servers) == expected


def test_complete_servers_speculate():
    settings = load(ServeSettings, ["--speculate=ngram:4"])
    server = load(DecodeSettings, server_argv(settings, "decode", cores=8))
    assert server.speculate == "ngram:4"


def test_only_the_proxy_salts_the_cache_by_api_key():
    settings = up_settings("--api-key=client-key-1", "--cache-salt-by-key")
    urls = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
    assert "--cache-salt-by-key" in proxy_command(settings, urls, "s" * 16).argv
    for server in server_commands(settings, secret="s" * 16, cores=8):
        assert not any("cache-salt" in word for word in server.argv)


def test_options_reach_their_servers_and_no_others():
    settings = up_settings(
        *(
            "--model=m",
            "--dtype=float32",
            "--max-model-len=99",
            "--max-body-bytes=1000",
        ),
        *(
            "--prefill.block-size=16",
            "--prefill.kv-layout=LBCNHD",
            "--prefill.lease-s=3",
        ),
        "--client-timeout-s=600",
        *(
            "--prefill.dtype=bfloat16",
            "--no-decode.enable-prefix-caching",
            "--decode.tp=2",
        ),
    )
    prefill = load(PrefillSettings, server_argv(settings, "prefill", cores=8))
    decode = load(DecodeSettings, server_argv(settings, "decode", cores=8))
    assert (prefill.model, prefill.max_model_len, prefill.dtype) == (
        "m",
        99,
        "bfloat16",
    )
    assert (prefill.block_size, prefill.kv_layout, prefill.lease_s) == (
        16,
        "LBCNHD",
        3.0,
    )
    assert (decode.model, decode.dtype, decode.block_size, decode.tp) == (
        "m",
        "float32",
        64,
        2,
    )
    assert prefill.enable_prefix_caching and not decode.enable_prefix_caching
    assert (prefill.port, decode.port, prefill.max_body_bytes) == (0, 0, 1000)
    assert prefill.client_timeout_s == decode.client_timeout_s == 600


def test_every_group_option_is_one_of_its_server():
    settings = up_settings()
    for group, target in (
        (settings.prefill, PrefillSettings),
        (settings.decode, DecodeSettings),
    ):
        assert set(type(group).model_fields) - set(target.model_fields) == {"count"}


def test_the_proxy_gets_the_endpoint_and_all_urls():
    settings = up_settings(
        "--host=0.0.0.0", "--port=9", "--log-level=debug", "--max-body-bytes=5"
    )
    urls = {"prefill": ["http://a:1"], "decode": ["http://b:2", "http://c:3"]}
    command = proxy_command(settings, urls, "s" * 16)
    proxy = load(ProxySettings, command.argv[3:])
    assert (proxy.host, proxy.port, proxy.log_level) == ("0.0.0.0", 9, "debug")
    assert (proxy.max_body_bytes, proxy.prefill) == (5, ("http://a:1",))
    assert proxy.decode == ("http://b:2", "http://c:3")


@pytest.mark.parametrize(
    ("cores", "argv", "tp", "threads"),
    [
        (2, [], 1, 2),  # on a small machine, every server may use all cores
        (1, [], 2, 1),
        (4, [], 2, 2),
        (64, [], 1, 32),  # on a large machine, each server has a share of the cores
        (64, ["--prefill.count=3"], 4, 4),
    ],
)
def test_servers_share_the_cores_of_a_large_machine_only(cores, argv, tp, threads):
    assert default_threads(up_settings(*argv), cores=cores, tp=tp) == threads


def test_configured_threads_replace_the_default():
    settings = up_settings("--prefill.threads=3")
    assert "--threads=3" in server_argv(settings, "prefill", cores=64)
    assert "--threads=32" in server_argv(settings, "decode", cores=64)


def test_serve_starts_complete_servers_and_a_proxy_that_disaggregates_nothing():
    argv = ["m", "--count=2", "--tp=2", "--devices=0,1,2,3", "--itl-target-s=0.1"]
    argv += ["--max-resumes=7", "--connect-timeout-s=9", "--dtype=float32"]
    settings = load(ServeSettings, argv)
    commands = server_commands(settings, secret="s" * 16, cores=8)
    assert [(one.name, one.kind) for one in commands] == [
        ("server-0", "decode"),
        ("server-1", "decode"),
    ]
    servers = [load(DecodeSettings, one.argv[3:]) for one in commands]
    assert [server.devices for server in servers] == [(0, 1), (2, 3)]
    for server in servers:
        assert (server.model, server.role, server.tp) == ("m", "both", 2)
        assert (server.itl_target_s, server.connect_timeout_s) == (0.1, 9)
        assert (server.dtype, server.threads) == ("float32", 2)
    urls = {"prefill": [], "decode": ["http://s:1"]}
    proxy = load(ProxySettings, proxy_command(settings, urls, "s" * 16).argv[3:])
    assert proxy == load(
        ProxySettings,
        [
            *("--decode=http://s:1", "--disaggregate=never", "--max-resumes=7"),
            "--resume-wait-s=300",  # the time that a restart of a server may take
        ],
    )


def test_servers_get_the_address_of_the_store_unless_they_have_their_own():
    settings = load(
        UpSettings, ["--host-kv-bytes=1000", "--decode.host-kv", "10.0.0.1:8300"]
    )
    shared = {"secret": "s" * 16, "cores": 8, "store": "127.0.0.1:5000"}
    prefill = server_command(settings, "prefill", 0, **shared)
    decode = server_command(settings, "decode", 0, **shared)
    assert "--host-kv=127.0.0.1:5000" in prefill.argv
    assert "--host-kv=127.0.0.1:5000" not in decode.argv
    assert load(DecodeSettings, decode.argv[3:]).host_kv == "10.0.0.1:8300"
    store = store_command(settings, 1000, "s" * 16)
    assert load(StoreSettings, store.argv[3:]).host_kv_bytes == 1000
    assert store.env == {"BATON_CLUSTER_SECRET": "s" * 16}


@pytest.mark.parametrize(
    ("argv", "is_used"),
    [
        ([], True),
        (["--prefill.borrow-prefixes=never"], True),
        (["--prefill.borrow-prefixes=never", "--decode.host-kv=a:1"], False),
        (["--no-prefill.enable-prefix-caching", "--decode.host-kv=a:1"], False),
    ],
)
def test_store_is_started_only_for_servers_that_can_use_it(argv, is_used):
    settings = load(UpSettings, argv)
    assert uses_store(settings) is is_used
    shared = {"secret": "s" * 16, "cores": 8, "store": "127.0.0.1:5000"}
    prefill = server_command(settings, "prefill", 0, **shared)
    assert load(PrefillSettings, prefill.argv[3:])


def test_store_has_a_tenth_of_the_free_memory_only_on_hosts_with_gpus(monkeypatch):
    monkeypatch.setattr("deploy.cluster.cluster.free_host_bytes", lambda: 1000)
    monkeypatch.setattr("deploy.cluster.cluster.has_gpu", lambda: False)
    assert store_bytes(load(UpSettings, [])) == 0
    assert store_bytes(load(UpSettings, ["--host-kv-bytes=70"])) == 70
    monkeypatch.setattr("deploy.cluster.cluster.has_gpu", lambda: True)
    assert store_bytes(load(UpSettings, [])) == 100
    assert store_bytes(load(UpSettings, ["--device=cpu"])) == 0
    assert store_bytes(load(UpSettings, ["--host-kv-bytes=0"])) == 0
    assert store_bytes(load(UpSettings, ["--on=ray"])) == 0
