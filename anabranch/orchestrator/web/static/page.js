// The status page. Everything that members wrote (names, labels, reasons) goes through `text`, never into markup.

import { Chart } from "./chart.js";
import { follow } from "./connection.js";
import { drawClosed, drawData, drawSettings } from "./counts.js";
import { $ } from "./dom.js";
import { drawHead, forgetRates } from "./head.js";
import { enter, record, remember } from "./known.js";
import { drawSlots, forgetSlots } from "./rounds.js";
import { drawFragments, drawLedger, drawMembers } from "./tables.js";
import { drawEvents } from "./tape.js";

const chart = new Chart($("plot"), $("chart-empty"));

function begin(from) {
  if (!enter(from)) return;
  forgetRates();
  forgetSlots();
}

function take(picture, from) {
  begin(from);
  remember(picture);
  drawHead(picture);
  drawSlots(picture);
  drawFragments(picture);
  drawMembers(picture);
  drawLedger(picture);
  drawClosed(picture);
  drawData(picture);
  drawSettings(picture);
  chart.draw(picture.heldout ?? []);
}

function takeEvents(news, from) {
  begin(from);
  record(news, from);
  drawEvents();
}

follow(take, takeEvents);
