"""Settings come from options, environment variables and a file. Wrong ones are
refused.
"""

import json
import os
from pathlib import Path

import pytest

from protocol.settings.settings import (
    PROGRAMS,
    DecodeSettings,
    PrefillSettings,
    ProxySettings,
    StoreSettings,
    UpSettings,
    describe,
    load,
    parse,
    to_argv,
)
from protocol.settings.sources import (
    ConfigError,
    clean_environment,
    field_paths,
    option_name,
    unread_variables,
)


@pytest.fixture(autouse=True)
def no_baton_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)


P, D, PROXY, UP = PrefillSettings, DecodeSettings, ProxySettings, UpSettings
KV = StoreSettings
SHARED = "--decode.tp=2 --decode.dcp=2 --decode.block-size=32"


@pytest.mark.parametrize(
    ("cls", "argv", "message"),
    [
        (P, "--blck-size 16", "--block-size"),
        (UP, "--prefil.tp=2", "--prefill.tp"),
        (UP, "--decode.cuont 2", r"\(did you mean --decode\.count\?\)"),
        (UP, "--decod.cuont 2", r"\(did you mean --decode\.count\?\)"),
        (
            UP,
            "--no-prefil.pack-weigts",
            r"\(did you mean --no-prefill\.pack-weights\?\)",
        ),
        (
            UP,
            "--prefil.port 1",
            r"\(did you mean --prefill\.port\? There is no such option here, but "
            r"--port for the whole cluster\)",
        ),
        (
            UP,
            "--prefill.model m",
            r"m \(no such option here, but --model for the whole cluster\)",
        ),
        (
            UP,
            "--decod.register http://h:1",
            r"mean --decode\.register\? .* --register of baton decode",
        ),
        (UP, "--prefil 1", r"\(did you mean --prefill"),
        (UP, "--prefill.hang-timeout-s=2", "--prefill.hang-timeout-s"),
        (UP, "--decode 3", "^--decode: must be a group .* as --decode.tp, not 3$"),
        (UP, "--tp 2", r"--tp 2 \(did you mean --prefill.tp or --decode.tp\?\)"),
        (
            UP,
            "--no-pack-weights",
            r"mean --no-prefill.pack-weights or --no-decode.pack",
        ),
        (P, "--block 16", "--block"),  # an abbreviation, which is not accepted
        (P, "--decode http://h:1", r"http://h:1 \(an option of baton proxy and b"),
        (PROXY, "--lease-s=9", r"\(an option of baton prefill, baton decode and "),
        (
            PROXY,
            "--no-pack-weights",
            r"of baton prefill, baton decode and baton serve\)",
        ),
        (PROXY, "stray", "stray"),
        (P, "--config", "--config: expected one argument"),
        (P, "--config /no/such/none.yaml", r"none\.yaml"),
        (P, "--kv-layout BHLCD", "--kv-layout: .* lacks axis N"),
        (
            P,
            "--kv-layout DBHLCN",
            "not an order of the axes: use each of BHLCND once, D last",
        ),
        (P, "--host-kv 8300", "--host-kv: .* is not HOST:PORT"),
        (P, "--host-kv 0.0.0.0:1", "--host-kv: .*cannot connect to 0.0.0.0"),
        (
            P,
            "--borrow-prefixes never --host-kv a:1",
            "--host-kv: a:1 has no effect with --borrow-prefixes never",
        ),
        (P, "--no-enable-prefix-caching --host-kv a:1", "needs the prefix cache"),
        (KV, "--host ::", "--host: servers cannot connect to ::"),
        (KV, "--host-kv-bytes 0", "--host-kv-bytes: must be"),
        (UP, "--on ray --host-kv-bytes 5", "--on: .*start `baton kv` on each node"),
        (UP, "--host-kv-bytes -1", "--host-kv-bytes: must be"),
        (P, "--block-size 0", "--block-size: must be greater than or equal to 1"),
        (P, "--block-size x", "valid integer"),
        (P, "--kv-cache-dtype fp8", "--kv-cache-dtype: .*float8_e4m3fn"),
        (
            P,
            "--hf-overrides [1]",
            r"--hf-overrides: .*\[1\].* is not a JSON object; write for example",
        ),
        (P, "--kv-scales 0.5", "--kv-scales: .*--kv-cache-dtype float8_e4m3fn"),
        (P, "--port 65536", "--port: must be less than or equal to 65535"),
        (P, "--lease-s 0", "--lease-s: must be greater than or equal to 0.001"),
        (P, "--lease-s inf", "finite"),
        (P, "--dtype int4", "--dtype: .*float32"),
        (
            P,
            "--kv-cache-tokens 64 --kv-cache-bytes 9",
            "-bytes: 9 cannot be combined with --kv-cache-tokens 64",
        ),
        (P, "--speculate tree:4", '--speculate: "tree:4" names no drafter: write off'),
        (D, "--speculate ngram:99", "--speculate: .*verifies 1 to 16 .*ngram:16"),
        (UP, "--speculate ngram", "--speculate: .*no number of tokens: write off"),
        (UP, "--prefill.speculate 4", "--prefill.speculate: .*names no drafter"),
        (P, "--tp 2 --dcp 2", "--dcp: 2 needs --role decode"),
        (D, "--role both --tp 2 --dcp 2", "--dcp: 2 needs --role decode"),
        (D, "--tp 4 --dcp 3", "--dcp: 3 does not divide --tp 4"),
        (P, "--tp 4 --ep 3", "--ep: 3 does not divide --tp 4"),
        (D, "--tp 2 --dcp 0", "--dcp: .*greater than or equal to 1"),
        (
            UP,
            "--decode.role prefill",
            "--decode.role: must be decode or both, not prefill",
        ),
        (
            UP,
            "--prefill.role=decode",
            "--prefill.role: must be prefill or both, not decode",
        ),
        (UP, SHARED, r"multiple of --prefill\.block-size, which is 64"),
        *(
            (
                D,
                f"--transfer-costs={costs}",
                "--transfer-costs: .*(is not a list|are not|number)",
            )
            for costs in ("3,8", "3,8,0", "3,8,x", "nan,8,7", "inf,8,7", "[", "[1,2")
        ),
        (
            PROXY,
            "--cors-origin a.example",
            r"--cors-origin: .*write http\(s\)://host:port",
        ),
        (
            PROXY,
            "--max-queued-tokens 9",
            "--max-queued-tokens 9 .*an option of baton prefill",
        ),
    ],
)
def test_error_about_the_command_line_has_option_value_and_fix(cls, argv, message):
    with pytest.raises(ConfigError, match=message):
        load(cls, argv.split())


@pytest.mark.parametrize(
    ("cls", "argv", "name", "value"),
    [
        (D, "--transfer-costs 3,8,7.5", "transfer_costs", (3, 8, 7.5)),
        (D, "--tp 4 --dcp 2", "dcp", 2),
        (D, "--kv-layout NHBCLD", "kv_layout", "NHBCLD"),
        (UP, "--cors-origin *", "cors_origin", ("*",)),
        (PROXY, "--cors-origin https://a.b --cors-origin http://b:3/", "cors_origin",
         ("https://a.b", "http://b:3")),
    ],
)  # fmt: skip
def test_option_value_is_parsed(cls, argv, name, value):
    assert getattr(load(cls, argv.split()), name) == value


def test_dcp_accepts_prefill_blocks_that_divide_decode_blocks() -> None:
    assert load(UP, [*SHARED.split(), "--prefill.block-size=16"]).decode.dcp == 2
    assert load(UP, ["--decode.block-size=32"]).decode.block_size == 32


def test_defaults_of_transport_and_step_sizes_depend_on_the_device() -> None:
    assert [load(D, []).transfer_for(device) for device in ("cpu", "cuda")] == [
        "nixl",
        "auto",
    ]
    assert load(D, ["--transfer=auto"]).transfer_for("cpu") == "auto"
    for cls in (P, D):
        settings = load(cls, [])
        assert settings.batched_tokens_for("cpu") == 512
        assert settings.batched_tokens_for("cuda") == 8192
        assert settings.num_seqs_for("cpu") == 64
        assert settings.num_seqs_for("cuda") == 256
    assert load(P, ["--max-num-batched-tokens=9"]).batched_tokens_for("cuda") == 9
    assert load(P, ["--max-num-seqs=9"]).num_seqs_for("cuda") == 9


def test_usual_target_between_tokens_follows_role_and_device() -> None:
    both = ["--role=both"]
    assert load(D, []).usual_itl_target_for("cuda") == 0.025
    assert load(D, both).usual_itl_target_for("cuda") is None
    assert load(D, []).usual_itl_target_for("cpu") == 0.5
    assert load(D, both).usual_itl_target_for("cpu") == 0.5
    assert load(P, []).usual_itl_target_for("cuda") is None
    assert load(P, []).usual_itl_target_for("cpu") is None


def test_command_line_precedes_environment_file_and_default_also_in_groups(
    tmp_path, monkeypatch
):
    file = tmp_path / "up.yaml"
    file.write_text(
        "prefill: {block-size: 16, max_num_seqs: 7, lease_s: 9}\ndecode: {tp: 2}\n"
    )
    monkeypatch.setenv("BATON_CONFIG", str(file))
    monkeypatch.setenv("BATON_PREFILL__MAX_NUM_SEQS", "8")
    monkeypatch.setenv("BATON_PREFILL__LEASE_S", "10")
    settings = load(UP, ["--prefill.lease-s", "11"])
    prefill = settings.prefill
    assert prefill.tp == 1  # the default
    assert prefill.block_size == 16  # from the file
    assert prefill.max_num_seqs == 8  # from the environment
    assert prefill.lease_s == 11.0  # from the command line
    assert (settings.decode.tp, settings.decode.block_size) == (2, 64)
    assert load(UP, ["--config", os.devnull]).decode.tp == 1


@pytest.mark.parametrize(
    ("misspelt", "similar"),
    [
        ("BATON_BLOK_SIZE", "BATON_BLOCK_SIZE"),
        # BATON_CACHE is a variable, but not an option.
        ("BATON_CASHE", "BATON_CACHE"),
    ],
)
def test_unknown_variable_is_an_error_unless_another_program_reads_it(
    monkeypatch, misspelt, similar
):
    for name in (
        "BATON_LEASE_S",
        "BATON_PREFILL__TP",
        "BATON_TEST_MODELS",
        "BATON_EVAL_DATA",
    ):
        monkeypatch.setenv(name, "2")
    assert load(D, []).tp == 1
    monkeypatch.setenv(misspelt, "16")
    with pytest.raises(ConfigError, match=rf"{misspelt} \(did you mean {similar}"):
        load(P, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok_size: 1", r"unknown key blok_size \(did you mean block_size"),
        ("prefill: {tpp: 1}", r"unknown key prefill.tpp"),
        ("prefill: {tp: true}", r"prefill.tp is true, but it is not an on/off"),
        (
            "prefill.tp: 1",
            r"unknown key prefill.tp \(write it as a key under its group",
        ),
        ("prefill: {port: 1}", r"unknown key prefill.port"),
        ("tp: 2\ntp: 2", "found tp a second time"),
        ("a: [1", "not YAML: while parsing"),
        ("- a", "not a mapping"),
        ("a: [", "flow node"),
        ("config: other.yaml", "unknown key config"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    cls = UpSettings if "prefill" in text else PrefillSettings
    with pytest.raises(ConfigError, match=message):
        load(cls, [f"--config={file}"])


def test_error_names_the_setting_as_the_user_wrote_it(tmp_path, monkeypatch):
    file = tmp_path / "up.yaml"
    file.write_text("prefill: {tp: x, block-size: [1]}\ndecode: {dcp: 3}\nhost: null\n")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    monkeypatch.setenv("BATON_PREFILL__TP", "0")
    monkeypatch.setenv("BATON_DECODE", '{"block_size": "yes", "tpp": 1}')
    with pytest.raises(ConfigError) as caught:
        load(UP, ["--decode.kv-scales=2", "--prefill.device=gpu", "--decode.tp", "2"])
    assert sorted(str(caught.value).splitlines()) == [
        "--decode.block-size (in BATON_DECODE): must be a valid integer, not yes",
        "--decode.dcp (in the --config file): 3 does not divide --decode.tp 2: use a "
        "divisor of it",
        "--decode.kv-scales: 2 has no effect: give --decode.kv-cache-dtype "
        "float8_e4m3fn too, or leave the scales out",
        "--decode.tpp (in BATON_DECODE): is not an option",
        "--host (in the --config file): must be a valid string, not null",
        "--prefill.block-size (in the --config file): must be a valid integer, not [1]",
        "--prefill.device: must be auto, cpu or cuda, not gpu",
        "BATON_PREFILL__TP: must be greater than or equal to 1, not 0",
    ]


def test_group_variable_that_is_not_json_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_DECODE", "{")
    with pytest.raises(
        ConfigError, match=r"^BATON_DECODE: not JSON; .* by BATON_DECODE__TP$"
    ):
        load(UP, [])


def test_empty_variables_of_the_store_mean_the_default(monkeypatch):
    monkeypatch.setenv("BATON_HOST_KV", "")
    monkeypatch.setenv("BATON_HOST_KV_BYTES", "")
    assert load(D, []).host_kv is None
    assert load(KV, []).host_kv_bytes is None


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_wildcard_address_is_never_advertised_to_decode_servers(wildcard, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "one of many machines")
    with pytest.raises(
        ConfigError, match="--side-channel-host: decode servers cannot connect"
    ):
        load(P, ["--host", wildcard])
    assert (
        load(
            P, ["--host", wildcard, "--side-channel-host", "p"]
        ).advertised_side_channel_host
        == "p"
    )
    load(D, ["--host", wildcard])


@pytest.mark.parametrize(
    ("cls", "argv"),
    [
        (P, ["--host", "10.0.0.7"]),
        (D, ["--host", "::"]),
        (P, ["--side-channel-host", "host-p"]),
    ],
)
def test_servers_of_several_machines_need_a_configured_secret(cls, argv, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        load(cls, argv)
    for words in (*argv, "set BATON_CLUSTER_SECRET to the same text for all"):
        assert words in str(refused.value)
    for local in ("localhost", "127.0.0.2", "::1"):
        load(cls, [argv[0], local])
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "one of many machines")
    load(cls, argv)


def test_server_urls_repeat_or_join_with_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repeated = load(PROXY, ["--prefill", "http://a:1/", "--prefill", "http://b:2"])
    assert repeated.prefill == ("http://a:1", "http://b:2")
    monkeypatch.setenv("BATON_DECODE", "http://c:3,https://d:4")
    assert load(PROXY, []).decode == ("http://c:3", "https://d:4")
    valid_urls = "http://[::1]:3", "http://a_b:3", "http://\u00fc.example:3"
    assert load(PROXY, [f"--decode={url}" for url in valid_urls]).decode == valid_urls
    wrong_hosts = (
        "http://u:p@c:3",
        "http://c d:3",
        "http://c..d:3",
        f"http://{'c' * 64}:3",
    )
    wrong_ports = ("http://c:0", "http://c:65536", "http://c:x", "http://[::1")
    for wrong_url in (
        "c:3",
        "ftp://c:3",
        "http://c:3/v1",
        "http://",
        *wrong_hosts,
        *wrong_ports,
    ):
        with pytest.raises(ConfigError, match=r"write http\(s\)://host:port"):
            load(PROXY, ["--decode", wrong_url])


@pytest.mark.parametrize("cls", PROGRAMS.values())
def test_help_explains_every_option(cls, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(cls, ["--help=all"], prog="baton x")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    words = " [MODEL]" if "model" in cls.model_fields else ""
    assert text.startswith(f"usage: baton x{words} [options]\n\n")
    assert "default: None" not in text and "tuple[" not in text
    assert "SecretStr" not in text and "{{" not in text
    groups = {path[0] for path in field_paths(cls) if len(path) > 1}
    for path in field_paths(cls):
        if len(path) > 1 or path[0] not in groups:
            assert option_name(path) in text
    help_texts = [info.description for info in cls.model_fields.values()]
    assert all(help_texts) and len(set(help_texts)) == len(help_texts)


def test_first_line_shows_changed_settings_and_all_at_debug_level() -> None:
    changed = json.loads(describe(load(UP, ["--port=1", "--prefill.tp=2"])))
    assert changed == {"port": 1, "prefill": {"tp": 2}}
    settings = load(UP, ["--port=1", "--log-level=debug"])
    assert json.loads(describe(settings)) == settings.model_dump(mode="json")


def test_secrets_are_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "correct horse battery")
    settings = load(P, [])
    assert "horse" not in describe(settings) + repr(settings) + " ".join(
        to_argv(settings)
    )
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "too short")
    monkeypatch.setenv("BATON_API_KEY", "[too short")
    (file := tmp_path / "a.yml").write_text('api-key: "too short')
    for argv, message in (
        ([], r"T: .* 16 characters"),
        ([], "Y: it is not a list"),
        ([file], "YAML"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            load(P, [f"--config={one}" for one in argv])
        assert "too short" not in str(caught.value)


def test_settings_read_from_their_argv_are_the_same() -> None:
    argv = [
        "--kv-layout=LBCNHD",
        "--no-enable-prefix-caching",
        "--transfer=nixl",
        "--seed=5",
    ]
    settings = load(D, argv)
    assert load(D, to_argv(settings)) == settings
    proxy = load(PROXY, ["--decode=http://a:1", "--decode=http://b:1"])
    assert load(PROXY, to_argv(proxy)) == proxy


def test_register_is_read_from_option_variable_and_file(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "one of many machines")
    assert load(D, ["--register=http://a:1"]).register_with == ("http://a:1",)
    (file := tmp_path / "d.yaml").write_text("register: [http://b:2]")
    assert load(D, [f"--config={file}"]).register_with == ("http://b:2",)
    monkeypatch.setenv("BATON_REGISTER", "http://c:3")
    settings = load(D, [])
    assert settings.register_with == ("http://c:3",)
    assert "--register=http://c:3" in to_argv(settings)
    assert json.loads(describe(settings))["register"] == ["http://c:3"]
    monkeypatch.setenv("REGISTER", "http://d:4")
    assert load(D, []).register_with == ("http://c:3",)


def test_variables_of_other_programs_are_listed_with_similar_names(monkeypatch):
    for name in (
        "BATON_TP",
        "BATON_LEASE_S",
        "BATON_HANG_TIMEOUT_S",
        "BATON_PORT",
        "BATON_CACHE",
    ):
        monkeypatch.setenv(name, "1")
    assert unread_variables(UP) == [
        "BATON_HANG_TIMEOUT_S",
        "BATON_LEASE_S (did you mean BATON_PREFILL__LEASE_S or BATON_DECODE__LEASE_S?)",
        "BATON_TP (did you mean BATON_PREFILL__TP or BATON_DECODE__TP?)",
    ]
    assert unread_variables(P) == []


def test_variable_that_kubernetes_sets_for_a_service_is_named_with_its_fix(monkeypatch):
    monkeypatch.setenv("BATON_SERVICE_HOST", "10.96.0.10")
    monkeypatch.setenv("BATON_PORT", "tcp://10.96.0.10:80")
    with pytest.raises(ConfigError, match=r"^BATON_PORT .*enableServiceLinks: false"):
        load(DecodeSettings, [])


def test_launcher_does_not_pass_on_its_settings() -> None:
    machine_variables = {"BATON_CACHE": "c", "BATON_EVAL_DATA": "d", "HF_TOKEN": "t"}
    environ = {"BATON_PORT": "1", "BATON_READY_FD": "3", **machine_variables}
    assert clean_environment(environ) == machine_variables
