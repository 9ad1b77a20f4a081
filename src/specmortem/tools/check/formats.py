"""A check for programs: JSON, annotations of GitHub, SARIF, and a page that stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specmortem import __version__
from specmortem.affected.answers import Answer, IncidentAnswer, joint
from specmortem.affected.targets import Target
from specmortem.incident import all_incidents, facts
from specmortem.report.html import standalone
from specmortem.tools.check.render import counts, findings
from specmortem.tools.check.report import Checked, CheckReport, date, title

LEVELS: dict[Answer, str] = {"affected": "error", "unknown": "warning", "not-affected": "notice"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_json(report: CheckReport) -> str:
    """`understood`, `answers` and `safe_target` of the launch that is worst off, and each launch under `launches`."""
    worst = _case(report.worst)
    data = {
        "answer": report.answer,
        "exit_code": report.exit_code,
        "date": date(),
        **{key: worst[key] for key in ("understood", "safe_target", "missing")},
        "answers": _joined(report),
        "launches": [_case(each) for each in report.checked],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _case(each: Checked) -> dict[str, Any]:
    return {
        "name": each.name,
        "subject": each.subject or each.config.version,
        "answer": each.answers.answer,
        "understood": each.understood,
        "not_read": list(each.config.unknown),
        "answers": [_answer(each, one) for one in each.answers.incidents],
        "safe_target": _target(each.target),
        "on_this_release": _target(each.advice.stay),
        "missing": each.missing,
    }


def _answer(each: Checked, one: IncidentAnswer) -> dict[str, Any]:
    return {
        "incident": one.incident,
        "answer": one.answer,
        "causes": [cause.cause for cause in one.deciding],
        "commands": each.commands(one),
        "evidence": {cause.cause: cause.why for cause in (*one.causes, *one.others)},
        "links": [cause.cause for cause in one.others if cause.reached],
    }


def _joined(report: CheckReport) -> list[dict[str, Any]]:
    """Each incident once, with the worst answer that a launch has."""
    found = []
    for slug in all_incidents():
        pairs = [
            (each, one) for each in report.checked for one in each.answers.incidents if one.incident == slug
        ]
        worst = joint(one.answer for _, one in pairs)
        found.append(_answer(*next(pair for pair in pairs if pair[1].answer == worst)))
    return found


def _target(target: Target | None) -> dict[str, Any] | None:
    if target is None:
        return None
    return {"release": target.release, "flags": list(target.flags), "cost": target.cost}


def github(report: CheckReport) -> str:
    """Workflow commands; one for each incident that is affected or unknown."""
    lines = []
    for each in report.checked:
        for one in each.answers.incidents:
            if one.answer != "not-affected":
                told = "; ".join(f"{title(one.incident, c.cause)} ({c.why})" for c in one.deciding)
                place = f"file={_property(_file(each))}," if Path(_file(each)).is_file() else ""
                head = f"::{LEVELS[one.answer]} {place}title={_property(f'{one.incident}: {one.answer}')}::"
                lines.append(f"{head}{_data(told)}")
    return "\n".join([*lines, f"::notice::{_data(counts(report))}"]) + "\n"


def _file(each: Checked) -> str:
    """The first of the inputs that a launch is from."""
    return each.name.partition(" + ")[0]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(report: CheckReport) -> str:
    """SARIF 2.1.0: a rule for each cause, a result for each that is affected or unknown."""
    results = [
        _result(each, one, cause.cause, cause.why)
        for each in report.checked
        for one in each.answers.incidents
        for cause in one.deciding
    ]
    rules = [
        {"id": cause, "shortDescription": {"text": title(slug, cause)}, "properties": {"incident": slug}}
        for slug, one in all_incidents().items()
        for cause in one.exposure
    ]
    driver = {"name": "specmortem", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "properties": {"answer": report.answer}}
    return (
        json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False)
        + "\n"
    )


def _result(each: Checked, one: IncidentAnswer, cause: str, why: str) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": quote(_file(each))}}}
    told = f"{one.incident} {one.answer}: {title(one.incident, cause)}; {why}"
    level = {"notice": "note"}.get(LEVELS[one.answer], LEVELS[one.answer])
    return {"ruleId": cause, "level": level, "message": {"text": told}, "locations": [place]}


def html(report: CheckReport) -> str:
    """A page. Raises BadInputError when a text would make it fetch or run something."""
    titles = {slug: facts(slug).title for slug in all_incidents()}
    return standalone(
        Path(__file__).parent,
        "check.html.j2",
        "the check",
        report=report,
        titles=titles,
        title_of=title,
        counts=counts(report),
        lines=list(findings(report)),
    )
