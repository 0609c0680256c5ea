"use strict";
// Tooltip with the values under the pointer. Sets text only through textContent.
const tip = document.getElementById("tip");
const add = (parent, name, text, kind) => {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = text;
  if (kind) made.className = kind;
};
const show = (event) => {
  const hit = event.target.closest ? event.target.closest("[data-t]") : null;
  tip.hidden = !hit;
  document.querySelectorAll(".hit.on").forEach((each) => each.classList.remove("on"));
  if (!hit) return;
  hit.classList.add("on");
  tip.replaceChildren();
  add(tip, "b", hit.dataset.t);
  const names = hit.closest("figure").querySelectorAll(".legend li[data-s]");
  (hit.dataset.v ? hit.dataset.v.split("|") : []).forEach((value, index) => {
    const row = tip.appendChild(document.createElement("div"));
    add(row, "i", "", "key " + names[index].dataset.s);
    add(row, "span", names[index].textContent);
    add(row, "em", value);
  });
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18 + box.height < innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, below ? event.clientY + 18 : event.clientY - box.height - 10) + "px";
};
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
