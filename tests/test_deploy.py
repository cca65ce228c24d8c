"""What `deploy/` has for operators: the files are what their tools take, and say of the server what is true of it."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from serving.conftest import ADAPTERS, Server, server_flags

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
PORT = 8000


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined, without comments."""
    text = "\n".join(line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def told(name: str) -> str:
    """What the last instruction of a name says."""
    return [rest for instruction, rest in instructions() if instruction == name][-1]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    modules = ["--lora-modules", f"alpha={ADAPTERS / 'alpha'}"]
    server = Server(server_flags(*modules), ADAPTERS, {})
    yield server
    server.close()


def test_the_dockerfile_is_a_good_one() -> None:
    ran = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert told("USER") not in {"0", "root"}
    assert told("EXPOSE") == str(PORT)


def test_the_image_is_built_from_what_is_there() -> None:
    """Its build has the toolchain that this one has, copies files that are there, and builds as `make` does."""
    [image] = [rest for name, rest in instructions() if name == "FROM" and "rust:" in rest]
    version = re.search(r"rust:(\d+\.\d+)", image)
    needed = re.search(r'rust-version = "(\d+\.\d+)"', (ROOT / "Cargo.toml").read_text())
    assert version
    assert needed
    assert [int(part) for part in version[1].split(".")] >= [int(part) for part in needed[1].split(".")]
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            assert (ROOT / shlex.split(rest)[0]).exists(), rest
    built = [rest for name, rest in instructions() if name == "RUN" and "maturin build" in rest]
    assert len(built) == 1
    command = built[0].split("maturin build ")[1].replace("/wheels", "dist")
    assert f"maturin build {command}" in (ROOT / "Makefile").read_text()
    assert (
        f'"{re.search(r"maturin>=[^" + chr(34) + "]*", (ROOT / "deploy/Dockerfile").read_text())[0]}"'
        in (  # type: ignore[index]
            ROOT / "Makefile"
        ).read_text()
    )


def test_the_image_starts_a_server() -> None:
    """Without arguments it says what it takes; with a model that is not there, that."""
    entry, default = json.loads(told("ENTRYPOINT")), json.loads(told("CMD"))
    assert entry[0] == "manylora"
    program = str(BIN / entry[0])
    ran = subprocess.run([program, *entry[1:], *default], check=False, capture_output=True, text=True)
    assert (ran.returncode, "--lora-modules" in ran.stdout) == (0, True)
    ran = subprocess.run([program, *entry[1:], "/nowhere"], check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "/nowhere" in ran.stderr


def test_the_image_knows_whether_it_is_healthy(server: Server) -> None:
    command = json.loads(told("HEALTHCHECK").split("CMD ", 1)[1])
    assert command[0] == "python"
    assert f"127.0.0.1:{PORT}/" in command[2]

    def check(address: str) -> int:
        code = command[2].replace(f"http://127.0.0.1:{PORT}", address)
        return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode

    assert check(server.url) == 0
    assert check("http://127.0.0.1:1") != 0


def series_of(server: Server) -> set[str]:
    """Names of samples of a server that has answered for the base and an adapter."""
    server.text("base")
    server.text("alpha")
    answer = server.client.get("/metrics")
    return {re.split(r"[{ ]", line)[0] for line in answer.text.splitlines() if not line.startswith("#")}


def test_the_board_asks_for_series_that_there_are(server: Server) -> None:
    board = json.loads((DEPLOY / "grafana/dashboards/manylora.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    there = series_of(server)
    variables = board["templating"]["list"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [variable["definition"] for variable in variables if variable["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"(?:vllm|manylora):\w+", query)}
    assert len(asked) > 25
    assert asked <= there, asked - there
    # Labels, too: those that queries choose or sum by.
    text = server.client.get("/metrics").text
    labels = set(re.findall(r"[{,](\w+)=", text)) | {"instance", "le"}
    chosen = {name for query in queries for name in re.findall(r"(\w+)=~", query)}
    summed = {name for query in queries for by in re.findall(r"by \(([^)]*)\)", query) for name in by.split(", ")}
    assert chosen | summed <= labels
    names = {variable["name"] for variable in variables} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panels, variables])))
    assert used - {"__all"} <= names


def test_the_operations_page_names_series_that_there_are(server: Server) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    there = series_of(server)
    asked = set(re.findall(r"`((?:vllm|manylora):\w+)`", page))
    assert len(asked) > 5
    assert [name for name in asked if not {name, f"{name}_total", f"{name}_bucket"} & there] == []
    for path in re.findall(r"\(\.\./(deploy[^)]*)\)|`(deploy/[^`]+)`", page):
        assert (ROOT / "".join(path)).exists(), path


def test_compose_runs_what_there_is(tmp_path: Path) -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    build = services["server"]["build"]
    assert ((DEPLOY / build["context"]).resolve(), build["dockerfile"]) == (ROOT, "deploy/Dockerfile")
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"]
    # Its flags are flags.
    flags = [re.sub(r"\$\{(\w+)(:-([^}]*)|:\?[^}]*)\}", lambda found: found[3] or "/nowhere", flag)
             for flag in services["server"]["command"]]  # fmt: skip
    flags = [flag.replace("/models/adapters", str(tmp_path)) for flag in flags]
    ran = subprocess.run([BIN / "manylora", "serve", *flags], check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "/nowhere" in ran.stderr
    [prometheus] = documents(DEPLOY / "prometheus.yaml")
    targets = [
        target for job in prometheus["scrape_configs"] for one in job["static_configs"] for target in one["targets"]
    ]
    assert targets == [f"server:{PORT}"]
    [sources] = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    [boards] = documents(DEPLOY / "grafana/provisioning/dashboards/manylora.yaml")
    folder = boards["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "manylora.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert arguments[:2] == ["serve", "--config"]
    assert (unit["Service"]["ExecReload"], unit["Service"]["KillSignal"]) == ("/bin/kill -HUP $MAINPID", "SIGTERM")
    if analyze := shutil.which("systemd-analyze"):
        # With a program that is there.
        path = tmp_path / "manylora.service"
        path.write_text(text.replace(program, str(BIN / "manylora")))
        ran = subprocess.run([analyze, "verify", path], check=False, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr.replace("\n", "")) == (0, "")


# InferencePool of inference.networking.k8s.io/v1 and what is used of HTTPRoute, by their API references
# (gateway-api-inference-extension.sigs.k8s.io/reference/spec, gateway-api.sigs.k8s.io/reference/spec).
NAME = {"type": "string", "minLength": 1, "maxLength": 253, "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PICKER = an_object(
    ["name"], group={"type": "string"}, kind={"type": "string"}, name=NAME, port=an_object(["number"], number=NUMBER),
    failureMode={"enum": ["FailOpen", "FailClose"]},
)  # fmt: skip
BACKEND = an_object(["name"], group={"type": "string"}, kind={"type": "string"}, name=NAME, port=NUMBER)
SCHEMAS = {
    ("inference.networking.k8s.io/v1", "InferencePool"): an_object(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=an_object(["matchLabels"], matchLabels=LABELS),
        targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": an_object(["number"], number=NUMBER)},
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=PICKER,
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): an_object(
        [],
        parentRefs={"type": "array", "maxItems": 32, "items": an_object(["name"], name=NAME)},
        rules={"type": "array", "items": an_object(
            [],
            matches={"type": "array", "items": an_object([], path=an_object(
                [], type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value={"type": "string"}))},
            backendRefs={"type": "array", "items": BACKEND},
            timeouts=an_object([], request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        )},
    ),
}  # fmt: skip


def check_resource(resource: dict[str, Any]) -> None:
    import jsonschema

    schema = SCHEMAS.get((resource["apiVersion"], resource["kind"]))
    if schema is None:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    else:
        jsonschema.validate(resource["metadata"], an_object(["name"], name=NAME))
        jsonschema.validate(resource["spec"], schema)


@pytest.mark.parametrize("name", ["deployment", "inference-pool"])
def test_kubernetes_takes_the_resources(name: str) -> None:
    resources = documents(DEPLOY / f"kubernetes/{name}.yaml")
    for resource in resources:
        check_resource(resource)
        wrong = json.loads(json.dumps(resource).replace('"spec": {', '"spec": {"replicaz": 1, ', 1))
        with pytest.raises(Exception, match="replicaz"):
            check_resource(wrong)


def test_kubernetes_finds_the_pods_and_the_pods_their_server() -> None:
    resources = documents(DEPLOY / "kubernetes/deployment.yaml") + documents(DEPLOY / "kubernetes/inference-pool.yaml")
    by_kind = {resource["kind"]: resource["spec"] for resource in resources}
    pod = by_kind["Deployment"]["template"]
    labels = pod["metadata"]["labels"]
    selectors = [by_kind["Deployment"]["selector"]["matchLabels"], by_kind["Service"]["selector"]]
    selectors += [by_kind[kind]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "InferencePool")]
    assert all(selector == labels for selector in selectors)
    [container] = pod["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert by_kind["InferencePool"]["targetPorts"] == [{"number": PORT}]
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == told("USER")
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {told("VOLUME"), told("WORKDIR")} <= mounted
    # Flags are flags, and those that the comment shows are, too.
    shown = re.findall(r"^#   (\w+): ", (DEPLOY / "kubernetes/deployment.yaml").read_text(), re.MULTILINE)
    assert len(shown) > 3
    help_text = subprocess.run([BIN / "manylora", "serve", "--help"], check=True, capture_output=True, text=True).stdout
    assert [flag for flag in shown if f"--{flag.replace('_', '-')}" not in help_text] == []
    assert [flag for flag in container["args"] if flag.startswith("--") and flag not in help_text] == []
