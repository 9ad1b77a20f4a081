"""Which pages count as standing alone."""

import pytest

from specmortem.report.html import check_self_contained


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn/x.js"></script>',
        "<script>1</script>",
        '<link rel="stylesheet" href="style.css">',
        '<img src="https://host/a.png">',
        '<img src="//host/a.png">',
        '<img src="a.png">',
        '<img srcset="https://host/a.png 2x">',
        '<svg><use href="https://host/a.svg#x"/></svg>',
        '<svg><image xlink:href="http://host/a.png"/></svg>',
        '<p style="background: url(https://host/a.png)">',
        "<style>@import 'https://host/a.css';</style>",
        '<style>@font-face { src: url("//host/a.woff2") }</style>',
        '<video poster="https://host/a.png"></video>',
        '<iframe src="https://host/"></iframe>',
        '<body onload="f()">',
        '<a href="javascript:f()">x</a>',
        '<meta http-equiv="refresh" content="0; url=https://host/">',
    ],
)
def test_reports_what_would_run_or_be_fetched(html):
    assert len(check_self_contained(html)) >= 1


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://github.com/x">source</a>',
        '<img src="data:image/png;base64,AAAA">',
        '<svg><use href="#a"/><path clip-path="url(#b)"/></svg>',
        "<style>a { background: url(data:image/png;base64,AAAA) }</style>",
        "<p>url(https://host/a.png) and &lt;script&gt; in prose</p>",
    ],
)
def test_accepts_what_stays_inside_the_page(html):
    assert check_self_contained(html) == []


def test_says_where():
    assert check_self_contained('<p>\n<img src="a.png">') == ["line 2: <img src=a.png>"]
