"""Inspection of a model: modules and cost, shapes of all tensors, drawings, integrity of its files."""

from __future__ import annotations

from tformer.workflows.inspect.layout import Layout, lay_out, to_mermaid
from tformer.workflows.inspect.report import Node, Report, report_on
from tformer.workflows.inspect.subject import Question, Subject, given_batch, read_subject
from tformer.workflows.inspect.trace import Trace, empty_inputs, trace_shapes
from tformer.workflows.inspect.verify import Verdict, verify

__all__ = [
    "Layout",
    "Node",
    "Question",
    "Report",
    "Subject",
    "Trace",
    "Verdict",
    "empty_inputs",
    "given_batch",
    "lay_out",
    "read_subject",
    "report_on",
    "to_mermaid",
    "trace_shapes",
    "verify",
]
