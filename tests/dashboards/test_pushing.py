"""`caesura dashboards push` and `diff` against a server with Grafana's API."""

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.offline.dashboards.boards import BOARDS
from tests.dashboards.small_grafana import TOKEN, USER, small_grafana

CLI = CliRunner()


def run(*arguments: str) -> tuple[int, str]:
    result = CLI.invoke(app, ["dashboards", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_push_makes_the_folder_and_the_dashboards_and_again_changes_nothing() -> None:
    with small_grafana() as (grafana, url):
        status, said = run("push", "--url", url, "--token", TOKEN)
        assert (status, said.count("new ")) == (0, len(BOARDS))
        assert grafana.folders == {"caesura": "Caesura"}
        assert {uid: stored["folderUid"] for uid, stored in grafana.dashboards.items()} == {
            board.uid: "caesura" for board in BOARDS
        }
        before = grafana.writes
        status, said = run("push", "--url", url, "--token", TOKEN)
        assert (status, said.count("unchanged ")) == (0, len(BOARDS))
        assert grafana.writes == before


def test_diff_tells_what_somebody_changed_and_push_takes_it_back() -> None:
    with small_grafana() as (grafana, url):
        assert run("diff", "--url", url, "--token", TOKEN)[0] == 1
        run("push", "--url", url, "--token", TOKEN)
        assert run("diff", "--url", url, "--token", TOKEN)[0] == 0

        grafana.dashboards["caesura-overview"]["dashboard"]["title"] = "Mine"
        status, said = run("diff", "--url", url, "--token", TOKEN)
        assert status == 1
        assert '- "title": "Mine"' in said and '+ "title": "Caesura / Overview"' in said
        assert said.count("changed   ") == 1

        status, said = run("push", "--url", url, "--token", TOKEN)
        assert (status, said.count("changed   ")) == (0, 1)
        assert grafana.dashboards["caesura-overview"]["dashboard"]["version"] == 2
        assert run("diff", "--url", url, "--token", TOKEN)[0] == 0


def test_a_dashboard_that_was_moved_to_another_folder_is_different() -> None:
    with small_grafana() as (grafana, url):
        run("push", "--url", url, "--token", TOKEN)
        grafana.dashboards["caesura-routing"]["folderUid"] = "mine"
        assert run("diff", "--url", url, "--token", TOKEN)[0] == 1


def test_a_user_and_a_path_of_a_proxy_work_too() -> None:
    with small_grafana("/grafana") as (grafana, url):
        assert run("push", "--url", url, "--user", ":".join(USER), "--folder", "Agents")[0] == 0
        assert grafana.folders == {"caesura": "Agents"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token", "wrong"), "Unauthorized"),
        (("--user", "nobody"), "NAME:PASSWORD"),
        (("--token", TOKEN, "--user", "a:b"), "not both"),
    ],
)
def test_bad_credentials_are_told_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    with small_grafana() as (grafana, url):
        status, told = run("push", "--url", url, *arguments)
        assert status == 2
        assert said in told
        assert "Traceback" not in told
        assert grafana.writes == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "nonsense"])
def test_a_grafana_that_is_not_there_is_told_in_one_line(url: str) -> None:
    status, told = run("diff", "--url", url)
    assert status == 2
    assert "caesura dashboards:" in told
    assert "Traceback" not in told
