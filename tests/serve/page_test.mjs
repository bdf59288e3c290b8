// Drives the chat page in Chromium: node page_test.mjs URL. Run by test_page.py.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const url = process.argv[2];
const flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.argv[3], args: flags });
const page = await browser.newPage({ viewport: { width: 1000, height: 700 } });
page.setDefaultTimeout(60_000);
const problems = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
await page.goto(url);
await page.waitForFunction(() => document.querySelector("#model").value);

// Type, stream, stop: the slot is free again.
await page.click("summary");
await page.fill("#tokens", "400");
await page.fill("#text", "hello there");
await page.focus("#text");
await page.keyboard.press("Enter");
await page.waitForFunction(() => (document.querySelector("li.assistant span")?.textContent.length ?? 0) > 3);
assert.equal(await page.textContent("#send"), "Stop");
await page.click("#send");
await page.waitForSelector("li.assistant small");
assert.match(await page.textContent("li.assistant small"), /stopped|tokens/);
assert.equal(await page.textContent("#send"), "Send");
for (let i = 0; ; i++) {
  if ((await (await fetch(`${url}/metrics`)).text()).includes("bessemer_running_samples 0.0")) break;
  assert.ok(i < 100, "the slot was not freed");
  await new Promise((resolve) => setTimeout(resolve, 50));
}

// Markup in an answer stays text.
await page.click("#reset");
const markup = "<script>window.hacked = 1</script>\n<img src=x onerror='window.hacked = 2'> & " + "x".repeat(200);
const pieces = markup.match(/[^]{1,9}/g).map((content) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] }));
const end = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };
await page.route("**/v1/chat/completions", (route) => route.fulfill({
  contentType: "text/event-stream",
  body: [...pieces, end].map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("") + "data: [DONE]\n\n",
}));
await page.fill("#text", "Write a page.");
await page.click("#send");
await page.waitForSelector("li.assistant small");
assert.equal(await page.textContent("li.assistant span"), markup);
assert.equal(await page.evaluate(() => window.hacked), undefined);

// A phone: nothing is wider than the screen.
await page.setViewportSize({ width: 360, height: 640 });
assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0);
assert.ok(await page.isVisible("#send"));
assert.deepEqual(problems, []);
await browser.close();
