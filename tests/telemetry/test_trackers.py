"""The real packages of every tracker, in their offline modes, fed by a real run."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

MEAN = "rollout/reward_mean"


@pytest.fixture
def tracked(run_of_two, tmp_path):
    """Run two sessions with a tracker in a process of its own; returns the run folder."""

    def call(name, **variables):
        done = subprocess.run(
            [sys.executable, "-m", "bridle.cli", *map(str, run_of_two), "--telemetry", name],
            check=False,
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        assert "tracker_failed" not in done.stderr
        return run_of_two[-1]

    return call


def records_of(path):
    """The records of a W&B file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last of several
            yield Record.FromString(parts)
            parts = b""


def test_wandb_records_the_metrics_history_and_sample_table_of_a_run(tracked):
    folder = tracked("wandb", WANDB_MODE="offline")

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(file))
    (run,) = {record.run.display_name for record in records if record.HasField("run")}
    assert run == "first"
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in (record.history.item for record in records if record.HasField("history"))
    ]
    means = [(line["rollout/step"], line[MEAN]) for line in history if MEAN in line]
    assert means == [(1, 1.0), (2, 1.0)]
    assert list(folder.glob("wandb/offline-run-*/files/media/table/samples*"))


def test_trackio_records_the_metrics_and_sample_table_of_a_run(tracked, tmp_path):
    tracked("trackio", TRACKIO_PROJECT="front", TRACKIO_DIR=str(tmp_path / "trackio"))

    with sqlite3.connect(tmp_path / "trackio" / "front.db") as opened:
        rows = [json.loads(row[0]) for row in opened.execute("select metrics from metrics")]
    means = [(row["rollout/step"], row[MEAN]) for row in rows if MEAN in row]
    assert means == [(1, 1.0), (2, 1.0)]
    assert any("samples" in row for row in rows)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # in MLflow itself
def test_mlflow_records_the_metrics_and_samples_of_a_run(tracked, tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracked("mlflow", MLFLOW_TRACKING_URI=uri)

    client = MlflowClient(uri)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert [one.step for one in client.get_metric_history(run.info.run_id, MEAN)] == [1, 2]
    assert client.list_artifacts(run.info.run_id, "samples")


def test_tensorboard_reads_the_metrics_and_samples_of_a_run(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tracked("tensorboard")

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars(MEAN)] == [(1, 1.0), (2, 1.0)]
    samples = events.Tensors("samples/text_summary")
    assert b'"reply": "Four."' in samples[-1].tensor_proto.string_val[0]


@pytest.fixture
def collector():
    """A real OTLP endpoint on loopback: its URL and the spans that it got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


def test_opentelemetry_gets_a_trace_per_session_of_stages_calls_and_tools(tracked, collector):
    url, spans = collector
    tracked("otel", OTEL_EXPORTER_OTLP_ENDPOINT=url)

    roots = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["invoke_agent command"] * 2
    assert len({span.trace_id for span in roots}) == 2
    for root in roots:
        inside = [span for span in spans if span.parent_span_id == root.span_id]
        assert {span.trace_id for span in inside} == {root.trace_id}
        names = [span.name for span in inside]
        assert names[:2] == ["registered", "initializing"]
        assert names[-3:] == ["chat policy", "execute_tool add", "chat policy"]
        for span in inside:
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
        chat = {one.key: one.value for one in inside[-1].attributes}
        assert chat["gen_ai.operation.name"].string_value == "chat"
        assert chat["gen_ai.usage.output_tokens"].int_value > 0
