// Draws the charts of a report with uPlot; all values are in the page, the tables say the same.
(function () {
  "use strict";
  var charts = JSON.parse(document.getElementById("charts").textContent);
  var drawn = [];
  var DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 4], [12, 4]];

  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  // Vertical lines for what befell the run: checkpoints faint, all else strong.
  function marks(chart) {
    return function (u) {
      var c = u.ctx, top = u.bbox.top, height = u.bbox.height;
      c.save();
      chart.marks.forEach(function (mark) {
        var x = u.valToPos(mark.x, "x", true);
        if (x < u.bbox.left - 1 || x > u.bbox.left + u.bbox.width + 1) { return; }
        var quiet = mark.kind === "checkpoint";
        c.strokeStyle = colour(quiet ? "--quiet" : mark.kind === "resumed" ? "--c3" : "--c2");
        c.lineWidth = (quiet ? 1 : 2) * devicePixelRatio;
        c.setLineDash(quiet ? [1, 4] : mark.kind === "resumed" ? [6, 4] : []);
        c.beginPath();
        c.moveTo(x, top);
        c.lineTo(x, top + height);
        c.stroke();
      });
      c.restore();
    };
  }

  function short(u, ticks) {
    return ticks.map(function (tick) {
      return Math.abs(tick) >= 1e4 ? tick.toLocaleString("en") : String(Number(tick.toPrecision(6)));
    });
  }

  function number(u, value) { return value === null || value === undefined ? "-" : String(value); }

  function series(curve, place) {
    var stroke = colour("--c" + (place % 8 + 1));
    return {
      label: curve.name, stroke: stroke, width: 1.75, dash: DASHES[place % DASHES.length], spanGaps: true,
      value: number, points: { show: curve.dots, size: 7, fill: stroke, stroke: stroke }
    };
  }

  function axis(chart, which) {
    return {
      stroke: colour("--text"), grid: { stroke: colour("--line"), width: 0.5 },
      ticks: { stroke: colour("--line") }, size: which === "y" ? 62 : 40,
      values: chart.log.indexOf(which) < 0 ? short : undefined,
      label: which === "x" ? chart.xName : undefined, labelSize: 20, labelGap: 0
    };
  }

  function options(chart, width) {
    return {
      width: width, height: width < 500 ? 220 : 260, pxAlign: 0,
      scales: {
        x: { time: false, distr: chart.log.indexOf("x") >= 0 ? 3 : 1, log: 2 },
        y: { distr: chart.log.indexOf("y") >= 0 ? 3 : 1 }
      },
      series: [{ label: chart.xName, value: number }].concat(chart.curves.map(series)),
      axes: [axis(chart, "x"), axis(chart, "y")],
      cursor: chart.xName === "step" ? { sync: { key: "steps" } } : {},
      hooks: { drawAxes: [marks(chart)] }
    };
  }

  function draw() {
    drawn.forEach(function (u) { u.destroy(); });
    drawn = charts.map(function (chart) {
      var home = document.getElementById("chart-" + chart.key);
      var data = [chart.x].concat(chart.curves.map(function (curve) { return curve.values; }));
      return new uPlot(options(chart, Math.max(240, home.clientWidth)), data, home);
    });
  }

  // Arrow keys move the cursor of a chart, whose legend shows the values there.
  function keys(home, place) {
    var at = 0;
    home.addEventListener("keydown", function (event) {
      var step = { ArrowRight: 1, ArrowLeft: -1, PageUp: 20, PageDown: -20 }[event.key];
      if (!step) { return; }
      var u = drawn[place];
      at = Math.min(u.data[0].length - 1, Math.max(0, at + step));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.bbox.height / devicePixelRatio / 2 });
      event.preventDefault();
    });
  }

  draw();
  charts.forEach(function (chart, place) { keys(document.getElementById("chart-" + chart.key), place); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  var width = document.documentElement.clientWidth;
  addEventListener("resize", function () {
    if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; draw(); }
  });
  function printed(theme) { return function () { document.documentElement.dataset.theme = theme; draw(); }; }
  addEventListener("beforeprint", printed("light"));
  addEventListener("afterprint", printed(""));
  document.documentElement.dataset.drawn = "yes";
})();
