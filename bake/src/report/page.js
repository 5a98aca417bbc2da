
"use strict";
// The page says everything without this; it adds what takes a hand: finding, opening, pointing.
const make = (tag, more) => Object.assign(document.createElement(tag), more);

const tree = document.getElementById("tree");
const all = (open) => tree.querySelectorAll("details").forEach((d) => { d.open = open; });
const find = make("input", { type: "search", placeholder: "find a tensor" });
const rows = [...document.querySelectorAll("#tensors tbody tr")];
find.addEventListener("input", () => {
  const wanted = find.value.toLowerCase();
  rows.forEach((row) => { row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted); });
  if (wanted) for (let d = rows[0] && rows[0].closest("details"); d; d = d.parentElement.closest("details")) d.open = true;
});
tree.before(
  make("button", { textContent: "open all", onclick: () => all(true) }),
  make("button", { textContent: "close all", onclick: () => all(false) }),
  find,
);

for (const plot of document.querySelectorAll(".plot")) {
  const said = make("output", { textContent: "Point at a value to see what it is." });
  plot.after(said);
  plot.addEventListener("pointerover", (event) => {
    const title = event.target.querySelector && event.target.closest("rect") && event.target.querySelector("title");
    if (title) said.textContent = title.textContent;
  });
}
