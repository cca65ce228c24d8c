"""`manylora bench serve` without a server: what it draws, how it times, what comes of it. No test waits for a clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import selectors
import statistics
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from manylora.bench import load, report
from manylora.bench.arrivals import due_times
from manylora.bench.client import Answer, Client
from manylora.bench.figures import Figure, Series, figures
from manylora.bench.measure import EventReader, Measurement, measure
from manylora.bench.popularity import Popularity, choose, group_sizes
from manylora.bench.prompts import Lengths, Prompt, dataset_prompts, random_prompts
from manylora.bench.response import ResponseReader, TransferError
from manylora.bench.summary import detailed, jain, percentile, summarize, timeline
from manylora.bench.table import table
from manylora.bench.target import Target
from manylora.exceptions import ValidationError


def source(seed: int = 7) -> random.Random:
    return random.Random(seed)


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_gamma_at_the_rate_that_was_asked_for(burstiness: float) -> None:
    count, rate = 40_000, 25.0
    times = due_times(count, rate, burstiness, source())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / rate)
    drawn = gaps(times)
    # A Gamma distribution has the squared coefficient of variation 1 / shape and the skewness 2 / sqrt(shape).
    mean, deviation = statistics.fmean(drawn), statistics.pstdev(drawn)
    assert mean == pytest.approx(1 / rate)
    assert (deviation / mean) ** 2 == pytest.approx(1 / burstiness, rel=0.05)
    skewness = statistics.fmean(((gap - mean) / deviation) ** 3 for gap in drawn)
    assert skewness == pytest.approx(2 / math.sqrt(burstiness), rel=0.12)


def test_poisson_arrivals_have_exponential_gaps() -> None:
    drawn = sorted(gaps(due_times(40_000, 10.0, 1.0, source())))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert percentile(drawn, share * 100) == pytest.approx(-math.log(1 - share) / 10, rel=0.05)


def test_all_at_once_and_the_same_seed_again() -> None:
    assert due_times(5, math.inf, 1.0, source()) == [0.0] * 5
    assert (
        due_times(50, 2.0, 0.5, source(3)) == due_times(50, 2.0, 0.5, source(3)) != due_times(50, 2.0, 0.5, source(4))
    )


ADAPTERS = [f"a{number}" for number in range(20)]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("uniform", [1.0] * 20),
        ("random", [1.0] * 20),
        ("zipf:1.2", [rank**-1.2 for rank in range(1, 21)]),
        ("zipf", [1 / rank for rank in range(1, 21)]),
        # P(floor(n U^(1/a)) = k) = ((k + 1) / n)^a - (k / n)^a
        ("power:0.3", [((k + 1) / 20) ** 0.3 - (k / 20) ** 0.3 for k in range(20)]),
    ],
)
def test_popularities_are_their_formulas(text: str, weights: list[float]) -> None:
    count = 100_000
    counts = Counter(choose(Popularity.read(text), ADAPTERS, count, 0.0, source()))
    for name, weight in zip(ADAPTERS, weights, strict=True):
        share = weight / sum(weights)
        # Five standard deviations of a binomial.
        assert abs(counts[name] - count * share) < 5 * math.sqrt(count * share * (1 - share)), name


def test_mixes_that_are_dealt() -> None:
    def dealt(text: str, count: int) -> list[str | None]:
        return choose(Popularity.read(text), ADAPTERS, count, 0.0, source())

    assert dealt("identical", 9) == ["a0"] * 9
    assert dealt("distinct", 20) == ADAPTERS
    assert dealt("round-robin", 41) == [*ADAPTERS, *ADAPTERS, "a0"]
    skewed = dealt("skewed", 64)
    # The figures of Punica's paper for a batch of 64.
    assert sorted(Counter(skewed).values(), reverse=True) == [17, 17, 11, 7, 5, 3, 2, 1, 1]
    assert skewed != sorted(skewed, key=str)
    for count in range(1, 300):
        sizes = group_sizes(count, 1.5)
        assert sum(sizes) == count
        assert min(sizes) >= 1
    # More groups than adapters go around.
    assert set(choose(Popularity.read("skewed"), ["x", "y"], 64, 0.0, source())) == {"x", "y"}


def test_the_bases_share_is_exact_and_spread() -> None:
    chosen = choose(Popularity.read("uniform"), ADAPTERS, 1000, 0.3, source())
    assert chosen.count(None) == 300
    assert 100 < chosen[:500].count(None) < 200
    assert choose(Popularity.read("zipf:2"), [], 4, 0.0, source()) == [None] * 4
    assert choose(Popularity.read("uniform"), ADAPTERS, 4, 1.0, source()) == [None] * 4


@pytest.mark.parametrize(
    "text", ["zip", "uniform:2", "zipf:0", "zipf:x", "zipf:-1", "skewed:1", "power:nan", "zipf:inf", ""]
)
def test_what_is_no_popularity_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Popularity.read(text)


def test_lengths() -> None:
    assert Lengths.read("128") == Lengths(128, 128)
    assert str(Lengths.read("64:512")) == "64:512"
    drawn = {Lengths(3, 6).draw(source(seed)) for seed in range(100)}
    assert drawn == {3, 4, 5, 6}
    assert Lengths(100, 100).around(0.25) == Lengths(75, 125)
    for text in ("0", "5:4", "x", "1:", ":", "-3"):
        with pytest.raises(ValidationError):
            Lengths.read(text)
    for lengths, ratio in ((Lengths(3, 6), 0.5), (Lengths(3, 3), 1.0)):
        with pytest.raises(ValidationError):
            lengths.around(ratio)


def test_random_prompts_have_their_lengths_and_no_common_beginning() -> None:
    prompts = random_prompts(200, Lengths(4, 9), Lengths(2, 3), [5, 6, 7, 8, 9, 10, 11, 12], source())
    assert {prompt.input_len for prompt in prompts} == set(range(4, 10))
    assert {prompt.output_len for prompt in prompts} == {2, 3}
    for prompt in prompts:
        assert isinstance(prompt.content, list)
        assert len(prompt.content) == prompt.input_len
    assert len({str(prompt.content[:4]) for prompt in prompts}) > 190
    (text,) = random_prompts(1, Lengths(6, 6), Lengths(2, 2), None, source())
    assert isinstance(text.content, str)
    assert (len(text.content.split()), text.input_len) == (6, 0)


def test_datasets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "one", "output_tokens": 5},
        {"prompt": [1, 2, 3], "model": "sql"},
        {"messages": messages},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    read = dataset_prompts(file, 4, Lengths(9, 9), source(), shuffle=False)
    assert read == [
        Prompt("one", 0, 5), Prompt([1, 2, 3], 3, 9, "sql"), Prompt(messages, 0, 9), Prompt("one", 0, 5),
    ]  # fmt: skip
    shuffled = dataset_prompts(file, 30, Lengths(9, 9), source(), shuffle=True)
    assert Counter(str(prompt.content) for prompt in shuffled) == {"one": 10, "[1, 2, 3]": 10, str(messages): 10}
    for line in (
        "[1]",
        "{",
        '{"text": "x"}',
        '{"prompt": ""}',
        '{"prompt": "x", "output_tokens": 0}',
        '{"prompt": "x", "model": 3}',
    ):
        file.write_text('{"prompt": "x"}\n' + line)
        with pytest.raises(ValidationError, match="line 2"):
            dataset_prompts(file, 2, Lengths(9, 9), source(), shuffle=False)
    file.write_text("\n")
    for path in (file, tmp_path / "nothing"):
        with pytest.raises(ValidationError, match=path.name):
            dataset_prompts(path, 2, Lengths(9, 9), source(), shuffle=False)


# -- reading -------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "body", "keeps_alive"),
    [
        (CHUNKED + b"5\r\nhello\r\n6;x=1\r\n world\r\n0\r\n\r\n", b"hello world", True),
        (CHUNKED + b"0005\r\nhow\r\n\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n", b"how\r\n0123456789", True),
        (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
        (HEAD + b"Content-Length: 5\r\nConnection: close\r\n\r\nhello", b"hello", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok", b"ok", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
    ],
)
def test_responses_are_the_same_however_they_were_cut(response: bytes, body: bytes, keeps_alive: bool) -> None:
    cuts = [*itertools.combinations(range(1, len(response)), 2)]
    for first, second in [(1, 1), *source().sample(cuts, min(400, len(cuts)))]:
        reader = ResponseReader()
        parts = [response[:first], response[first:second], response[second:]]
        assert b"".join(reader.feed(part) for part in parts) == body
        assert reader.is_complete
        assert reader.keeps_alive is keeps_alive
    whole = ResponseReader()
    assert b"".join(whole.feed(bytes([byte])) for byte in response) == body
    assert whole.is_complete


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(HEAD + b"\r\nhello") == b"hello"
    assert not reader.is_complete
    reader.end()
    assert reader.is_complete


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000, CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\nabc\r\n", HEAD + b"Content-Length: -1\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_response_is_told(response: bytes) -> None:
    with pytest.raises(TransferError):
        ResponseReader().feed(response)


@pytest.mark.parametrize(("start", "told"), [(b"", "before the answer"), (CHUNKED + b"5\r\nhe", "in the middle")])
def test_a_connection_closed_too_early_is_told(start: bytes, told: str) -> None:
    reader = ResponseReader()
    reader.feed(start)
    with pytest.raises(TransferError, match=told):
        reader.end()


def test_events_are_the_same_however_they_were_cut() -> None:
    text = ": comment\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: three\n\n\n\ndata: ünï\n\n".encode()
    for cut in range(len(text)):
        reader = EventReader()
        assert [*reader.feed(text[:cut]), *reader.feed(text[cut:])] == ["one", "two\nthree", "ünï"]


def test_urls() -> None:
    for url in ("ftp://x", "http://", "http://x:99999", "https://"):
        with pytest.raises(ValidationError):
            Client(url)
    with pytest.raises(ValidationError, match="one line"):
        Client("http://x", {"Authorization": "a\r\nb"})
    assert Client("localhost:80").url == "localhost:80"


def token(text: str, reason: str | None = None, **fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}], **fields})


def delta(reason: str | None = None, **fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5}})


def answered(script: Sequence[tuple[float, Sequence[str]]], sent: float = 100.0, **fields: Any) -> Measurement:
    """What is measured of events that came at scripted times."""
    pieces = [(time, "".join(f"data: {data}\n\n" for data in events).encode()) for time, events in script]
    answer = Answer(
        200, {"content-type": "text/event-stream; charset=utf-8"}, sent, pieces, pieces[-1][0] if pieces else sent
    )
    measurement = Measurement("a", False, due=99.5, released=99.75)
    measure(Answer(**(vars(answer) | fields)), measurement)
    return measurement


def test_times_are_those_of_the_events() -> None:
    script = [
        (100.25, [token("a")]), (100.5, [token("b"), token("c")]), (101.25, [token("")]),
        (102.0, [token("d", "length"), USAGE, "[DONE]"]),
    ]  # fmt: skip
    one = answered(script)
    assert one.error is None
    assert (one.text, one.input_len, one.output_len, one.is_counted) == ("abcd", 11, 5, True)
    assert one.ttft == 0.25
    assert one.itls == [0.25, 0.0, 0.75, 0.75]
    assert one.tpot == 1.75 / 4
    assert one.e2el == 2.0
    assert (one.ttft_since_due, one.lateness) == (0.75, 0.25)


def test_of_a_chat_only_what_brings_tokens_counts() -> None:
    script = [
        (100.1, [delta(role="assistant", content="")]), (101.0, [delta(reasoning_content="hm")]),
        (102.0, [delta(content="yes")]), (103.0, [delta("stop"), "[DONE]"]),
    ]  # fmt: skip
    one = answered(script)
    assert (one.tokens_at, one.text, one.output_len, one.is_counted) == ([101.0, 102.0], "hmyes", 2, False)
    assert one.e2el == 3.0


def test_an_answer_of_nothing_but_its_end_has_a_first_token() -> None:
    one = answered([(101.0, [token("", "stop"), USAGE, "[DONE]"])])
    assert (one.error, one.ttft, one.tpot) == (None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("script", "fields", "told"),
    [
        ([(101.0, [token("a")])], {}, "without [DONE]"),
        ([], {}, "without [DONE]"),
        ([(101.0, ["[DONE]"])], {}, "no tokens"),
        ([(101.0, [token("a"), '{"error": {"message": "gone", "code": 500}}'])], {}, "ended with an error: gone"),
        ([(101.0, [token("a", "abort"), "[DONE]"])], {}, "finish reason `abort`"),
        ([(101.0, ["<html>"])], {}, "no JSON object: <html>"),
        ([(101.0, ["[1]"])], {}, "no JSON object"),
        ([], {"status": 404, "pieces": [(1.0, b'{"error": {"message": "no model x"}}')]}, "HTTP 404: no model x"),
        ([], {"status": 502, "pieces": [(1.0, b"<html>" + b"x" * 1000)]}, "HTTP 502: <html>x"),
        ([], {"headers": {"content-type": "application/json"}}, "no stream of events, but `application/json`"),
        ([], {"headers": {}}, "no stream of events"),
    ],
)
def test_whatever_is_no_whole_stream_is_told(script: list[Any], fields: dict[str, Any], told: str) -> None:
    error = answered(script, **fields).error
    assert error is not None
    assert told in error
    assert len(error) <= 200


# -- the open loop, in virtual time --------------------------------------------------------------------------------


class VirtualTime(selectors.DefaultSelector):
    """Time that passes at once, and only when everybody waits."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    selector = VirtualTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def loaded(
    dues: Sequence[float], seconds: float, max_concurrency: int | None = None, stall: float = 0.0
) -> list[Measurement]:
    measured = [Measurement("a", False, due) for due in dues]

    async def send(number: int, one: Measurement) -> None:
        if stall and number == 0:
            # The client itself is busy: nothing of the loop runs meanwhile.
            loop = asyncio.get_running_loop()
            loop._selector.now += stall  # type: ignore[attr-defined]
        await asyncio.sleep(seconds)
        one.ended = asyncio.get_running_loop().time()

    start, end = run_virtually(load.run(measured, send, max_concurrency))
    assert end == pytest.approx(max(one.ended for one in measured))
    for one in measured:
        one.due, one.released, one.sent, one.ended = (
            round(time - start, 3) for time in (one.due, one.released, one.sent, one.ended)
        )
    return measured


def test_a_slow_server_does_not_slow_the_load_down() -> None:
    measured = loaded([1.0, 2.0, 3.0], 60.0)
    assert [one.sent for one in measured] == pytest.approx([1, 2, 3], abs=0.01)
    assert [one.ended for one in measured] == pytest.approx([61, 62, 63], abs=0.01)


def test_waiting_for_a_place_is_no_lateness() -> None:
    measured = loaded([0.0, 1.0, 2.0, 3.0], 10.0, max_concurrency=2)
    assert [one.released for one in measured] == pytest.approx([0, 1, 2, 3], abs=0.01)
    assert [one.sent for one in measured] == pytest.approx([0, 1, 10, 11], abs=0.01)
    assert max(one.lateness for one in measured) < 0.01


def test_the_senders_own_lateness_is_measured() -> None:
    measured = loaded([0.0, 1.0, 2.0, 9.0], 0.5, stall=5.0)
    assert [one.lateness for one in measured] == pytest.approx([0, 4, 3, 0], abs=0.01)


def test_requests_go_out_in_the_order_of_their_time() -> None:
    measured = loaded([3.0, 1.0, 2.0], 0.5)
    assert [one.sent for one in measured] == pytest.approx([3, 1, 2], abs=0.01)


# -- what a run comes to -------------------------------------------------------------------------------------------


def test_percentiles_and_jain() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert [percentile([5, 7], percent) for percent in (0, 25, 100)] == [5, 5.5, 7]
    assert percentile([], 99) == 0
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1]) is None


def made(
    model: str, due: float, first: float, gap: float, count: int, error: str | None = None, late: float = 0.0
) -> Measurement:
    one = Measurement(model, model == "base", due, due + late, due + late, error=error)
    one.tokens_at = [] if error else [one.sent + first + gap * number for number in range(count)]
    one.ended = one.sent + first + gap * count
    one.input_len, one.output_len, one.is_counted = 7, count, True
    return one


RUN = [
    made("x", 10.0, 0.5, 0.25, 5), made("y", 10.0, 1.0, 0.25, 5), made("base", 11.0, 0.25, 0.25, 3),
    made("x", 11.5, 0.5, 0.25, 5), made("y", 12.0, 0.5, 0.0, 0, error="HTTP 404: gone"),
]  # fmt: skip


def test_a_runs_result_by_hand() -> None:
    result = summarize(RUN, 10.0, 14.0, (50, 99), {"ttft": 600, "e2el": 2000})
    assert (result["completed"], result["failed"], result["failures"]) == (4, 1, {"HTTP 404: gone": 1})
    assert (result["total_input_tokens"], result["total_output_tokens"], result["duration"]) == (28, 18, 4.0)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (
        1,
        4.5,
        11.5,
    )
    assert result["mean_ttft_ms"] == pytest.approx(562.5)
    assert result["median_ttft_ms"] == pytest.approx(500)
    assert result["mean_itl_ms"] == result["mean_tpot_ms"] == pytest.approx(250)
    # x twice and the base, but not y, whose first token took a second.
    assert result["request_goodput"] == 0.75
    rows = result["adapters"]
    assert [*rows] == ["x", "y", "base"]
    assert (rows["y"]["completed"], rows["y"]["failed"], rows["base"]["is_base"]) == (1, 1, True)
    assert rows["x"]["tokens_per_request_second"] == pytest.approx(10 / 3.5)
    assert result["worst_over_mean_ttft"] == pytest.approx(1.0 / 0.75)
    assert result["jain_index"] == pytest.approx(jain([10 / 3.5, 5 / 2.25]))
    assert not result["sender_was_late"]
    tokens, running = timeline(RUN, 10.0, 14.0)
    assert sum(tokens) == pytest.approx(18)
    assert running == [2, 4, 3, 1]


def test_a_late_sender_is_told() -> None:
    result = summarize([made("x", 10.0, 0.5, 0.25, 5, late=0.1)], 10.0, 12.0)
    assert result["sender_was_late"]
    assert result["mean_ttft_ms"] == pytest.approx(500)
    assert result["mean_ttft_since_due_ms"] == pytest.approx(600)
    assert "The sender itself was late (p99 100.0 ms)" in table(result | {"max_concurrency": None}, (50, 90, 99))


def test_a_run_of_nothing_but_failures_has_a_result() -> None:
    result = summarize([made("x", 10.0, 0.5, 0.0, 0, error="no connection")], 10.0, 12.0) | {"max_concurrency": 4}
    assert (result["completed"], result["failures"], result["mean_ttft_ms"]) == (0, {"no connection": 1}, 0)
    assert "1 x no connection" in table(result, (50, 90, 99))
    assert json.loads(json.dumps(result)) == result


def test_the_table_has_every_adapter_and_reason() -> None:
    text = table(summarize(RUN, 10.0, 14.0) | {"max_concurrency": None}, (50, 90, 99))
    for part in ("4 / 1", "TTFT (ms)", "p99", "x ", "base", "(base)", "Jain's index", "1 x HTTP 404: gone"):
        assert part in text, part
    assert len(detailed(RUN, 10.0)["ttfts"]) == len(RUN)


def test_reports_are_whole_pages_whose_pictures_are_pictures(tmp_path: Path) -> None:
    result = summarize(RUN, 10.0, 14.0)
    drawn = figures(result, RUN, 10.0, 14.0)
    assert len(drawn) == 6
    # All are below the largest.
    assert drawn[0].series[0].points[-1] == (1000.0, 1.0)
    page = report.page("a <title>", "text & more", drawn)
    assert "a &lt;title&gt;" in page
    assert "text &amp; more" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    for figure in drawn:
        picture = ElementTree.fromstring(report.svg(figure))
        marks = [part for part in picture.iter() if part.tag.endswith("polyline" if not figure.labels else "rect")]
        assert marks
    bars = Figure("t", "", "ms", [Series("mean", [(0.0, 2.0), (1.0, 4.0)])], ("<x>", "y"))
    rectangles = [part for part in ElementTree.fromstring(report.svg(bars)).iter() if part.tag.endswith("rect")]
    first, second = (float(part.attrib["height"]) for part in rectangles)
    assert second == pytest.approx(2 * first, abs=0.2)
    target = tmp_path / "report.html"
    report.check_path(str(target))
    report.write(str(target), "t", "x", drawn)
    assert target.read_text().endswith("</html>\n")


def test_ticks_are_round_and_cover_all() -> None:
    for highest in (0.003, 0.7, 1.0, 4.0, 9.99, 123.4, 1e6):
        marks = report.ticks(highest)
        assert marks[0] == 0
        assert highest <= marks[-1] * 1.0001 <= highest * 2
        assert 2 <= len(marks) <= 6
    assert report.ticks(0) == [0, 1]


def test_reports_that_cannot_be_written_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match=r"\.html or \.png"):
        report.check_path("x.pdf")
    with pytest.raises(ValidationError, match="no folder"):
        report.check_path(str(tmp_path / "no" / "x.html"))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValidationError, match=r"pip install manylora\[plots\]"):
        report.check_path(str(tmp_path / "x.png"))


def test_requests_are_those_of_the_endpoint() -> None:
    client = Client("http://x")
    completions = Target(client, "/v1/completions", {"temperature": 0.0, "ignore_eos": True})
    body = json.loads(completions.body(Prompt([1, 2], 2, 9), "sql"))
    assert body == {
        "model": "sql", "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    chats = Target(client, "/v1/chat/completions")
    assert json.loads(chats.body(Prompt("hi", 0, 9), "sql"))["messages"] == [{"role": "user", "content": "hi"}]
    for target, prompt in ((chats, Prompt([1], 1, 9)), (completions, Prompt([{"role": "user"}], 0, 9))):
        with pytest.raises(ValidationError):
            target.body(prompt, "sql")
