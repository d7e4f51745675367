from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """A collector of OpenTelemetry that keeps what it receives.

    Attributes:
        pushes: the metrics of each push, by name.
        spans: all spans.
        resources: the attributes of whoever pushed last.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pushes: list[dict[str, Metric]] = []
        self.spans: list[Span] = []
        self.resources: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def receive(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
            self.resources = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.pushes.append({metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics})
        else:
            assert path == "/v1/traces"
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.receive(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
