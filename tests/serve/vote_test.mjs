// Drives the page of votes in Chromium: node vote_test.mjs URL CHROMIUM. Run by test_vote.py.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.argv[3], args: flags });
const page = await browser.newPage({ viewport: { width: 390, height: 800 } });
page.setDefaultTimeout(60_000);
const problems = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
await page.goto(process.argv[2]);

// Two votes for the good answer, by key and by button; then a tie and a skip. Markup stays text.
for (const way of ["key", "button", "t", "s"]) {
  await page.waitForFunction(() => document.querySelector("#first").textContent);
  const position = await page.textContent("#position");
  const prompt = await page.textContent("#prompt");
  assert.match(prompt, /<script>window.hacked = 1<\/script>/);
  const first = (await page.textContent("#first")).startsWith("good");
  if (way === "key") await page.keyboard.press(first ? "1" : "2");
  else if (way === "button") await page.click(`[data-choice=${first ? "first" : "second"}]`);
  else await page.keyboard.press(way);
  await page.waitForFunction((before) => document.querySelector("#position").textContent !== before, position);
}
await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("All rows"));
assert.equal(await page.evaluate(() => window.hacked), undefined);
assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "wider than a phone");
assert.deepEqual(problems, []);
await browser.close();
