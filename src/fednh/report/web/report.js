"use strict";
// Everything on the page is readable without this script; it adds sorting, tabs, the client explorer and downloads.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const element = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text; // never innerHTML: names come from users
    if (className) node.className = className;
    return node;
  };

  // --- light and dark
  const root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const toggle = document.getElementById("theme");
  const label = () => { toggle.textContent = dark() ? "Light" : "Dark"; };
  toggle.hidden = false;
  toggle.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // --- sortable tables: numbers by value, words by alphabet, blanks last
  const key = (row, column) => {
    const cell = row.cells[column];
    const value = cell.dataset.value;
    if (value === undefined) return null;
    const number = Number(value);
    return value !== "" && Number.isFinite(number) ? number : value;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  for (const button of $$("thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = button.closest("table").tBodies[0], column = head.cellIndex;
      const rows = [...body.rows];
      const numeric = rows.some((row) => typeof key(row, column) === "number");
      const now = head.getAttribute("aria-sort");
      const direction = now ? (now === "descending" ? "ascending" : "descending") : (numeric ? "descending" : "ascending");
      for (const other of $$("th", head.parentElement)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      rows.sort((one, two) => {
        const a = key(one, column), b = key(two, column);
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * compare(a, b);
      });
      body.append(...rows);
    });
  }

  // --- long tables: show the rows that contain what is typed
  for (const input of $$("[data-find]")) {
    const place = input.closest(".find"), rows = [...place.nextElementSibling.querySelector("tbody").rows];
    place.hidden = false;
    input.addEventListener("input", () => {
      const sought = input.value.trim().toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(sought);
      const shown = rows.filter((row) => !row.hidden).length;
      place.querySelector("span").textContent = sought ? `${shown} of ${rows.length} rows` : "";
    });
  }

  // --- tabs
  for (const list of $$("[role=tablist]")) {
    const tabs = $$("[role=tab]", list);
    list.hidden = false;
    const show = (chosen) => tabs.forEach((tab) => {
      tab.setAttribute("aria-selected", String(tab === chosen));
      document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    });
    tabs.forEach((tab) => tab.addEventListener("click", () => show(tab)));
    show(tabs[0]);
  }

  // --- downloads
  for (const button of $$("button[data-csv]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([data.csv[button.dataset.csv]], { type: "text/csv" }));
      link.download = `${button.dataset.csv}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  // --- one client
  const explorer = document.getElementById("explorer");
  if (!explorer) return;
  const pick = { group: explorer.querySelector("#pick-group"), client: explorer.querySelector("#pick-client") };
  const find = explorer.querySelector("#find-client");
  const fill = (select, options) => select.replaceChildren(...options.map(([value, text]) => {
    const option = element("option", text);
    option.value = value;
    return option;
  }));
  const bars = (target, rows, largest, show) => target.replaceChildren(...rows.flatMap(([name, value, colour]) => {
    const bar = element("i");
    bar.style.width = value === null ? "0" : `${Math.max(0, 100 * value / largest)}%`;
    if (value === null) bar.style.minWidth = "0";
    if (colour) bar.style.background = colour;
    const track = element("div");
    track.append(bar);
    return [element("b", name), track, element("span", value === null ? "not measured" : show(value))];
  }));
  // --- one client's held-out samples: each class for every model, and what one model takes for what
  const MOST = 24; // a matrix of more classes cannot be read: its largest confusions are listed instead
  let chosen = null;
  const percent = (value) => value === null ? "–" : value.toFixed(1);
  const tableOf = (className, heads, rows) => {
    const table = element("table", undefined, className), head = element("tr"), body = element("tbody");
    head.append(...heads.map((text, i) => { const th = element("th", text, i ? "" : "word"); th.scope = "col"; return th; }));
    const top = element("thead");
    top.append(head);
    body.append(...rows.map((cells) => {
      const row = element("tr");
      row.append(...cells.map((cell, i) => {
        if (cell instanceof Node) return cell;
        const node = element(i ? "td" : "th", cell);
        if (!i) { node.scope = "row"; node.className = "word"; }
        return node;
      }));
      return row;
    }));
    table.append(top, body);
    const wide = element("div", undefined, "wide");
    wide.tabIndex = 0;
    wide.append(table);
    return wide;
  };
  const byClass = (group, held) => tableOf("", ["class", "n", ...held.models.map((m) => m.label)],
    held.classes.map((c, i) => {
      const count = element("td", String(held.held[i]));
      if (held.few[i] && held.held[i]) count.append(element("span", " few", "few"));
      return [group.classes[c], count, ...held.models.map((m) => `${percent(m.recall[i])} / ${percent(m.precision[i])}`)];
    }));
  const confusions = (group, held, model) => {
    const cells = [];
    for (let i = 0; i < model.confusion.length; i += 3) cells.push(model.confusion.slice(i, i + 3));
    if (held.classes.length > MOST) {
      const wrong = cells.filter(([t, p]) => t !== p).sort((a, b) => b[2] - a[2]).slice(0, MOST);
      return tableOf("", ["class", "taken for", "samples"], wrong.map(([t, p, n]) => [group.classes[t], group.classes[p], String(n)]));
    }
    const count = new Map(cells.map(([t, p, n]) => [`${t} ${p}`, n]));
    return tableOf("confusion", ["true class, taken for →", ...held.classes.map((c) => group.classes[c])], held.classes.map((t, i) => [
      group.classes[t],
      ...held.classes.map((p) => {
        const n = count.get(`${t} ${p}`) ?? 0, cell = element("td", n ? String(n) : "·", t === p ? "right" : "");
        cell.style.setProperty("--share", held.held[i] ? n / held.held[i] : 0);
        return cell;
      }),
    ]));
  };
  const showHeld = (group, client) => {
    const place = explorer.querySelector("#client-held"), held = group.held?.clients[client];
    if (!held?.models.length) return place.replaceChildren();
    const model = held.models.find((m) => m.label === chosen) ?? held.models.find((m) => m.label === held.leader) ?? held.models[0];
    const picker = element("div", undefined, "pickers"), label = element("label", "Model"), select = element("select");
    select.id = "pick-model";
    label.htmlFor = select.id;
    fill(select, held.models.map((m) => [m.label, m.label]));
    select.value = model.label;
    select.addEventListener("change", () => { chosen = select.value; showHeld(group, client); explorer.querySelector("#pick-model").focus(); });
    picker.append(label, select);
    place.replaceChildren(
      element("h3", `Its ${held.n} held-out samples, class by class`), byClass(group, held),
      element("p", "Recall / precision of each model in percent, on samples that no model was trained on; few: so few that the numbers say little.", "note"),
      element("h3", `What is taken for what: ${model.label}`), picker, confusions(group, held, model),
      element("p", "Rows are what the held-out samples are, columns what the model takes them for; outlined cells are right. The stronger the colour, the larger the share of its row.", "note"),
    );
  };
  const name = (group, client) => group.sites[client] ?? `Client ${client}`;
  const showClient = () => {
    const group = data.explorer[pick.group.value], client = Number(pick.client.value);
    const counts = group.counts[client] ?? [], total = counts.reduce((a, b) => a + b, 0);
    const owned = counts.map((n, c) => [group.classes[c], n]).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    const shown = owned.slice(0, 20);
    explorer.querySelector("#client-says").textContent =
      (counts.length ? `${name(group, client)} holds ${total.toLocaleString("en")} training samples of ${owned.length} of ${group.classes.length} classes` +
      (owned.length > shown.length ? `; the ${shown.length} largest are shown.` : ".") : `What ${name(group, client)} holds, only the site knows.`) +
      (group.held?.clients[client]?.says ? ` ${group.held.clients[client].says}` : "");
    explorer.querySelector("#client-classes").parentElement.hidden = !counts.length;
    bars(explorer.querySelector("#client-classes"), shown, Math.max(...owned.map(([, n]) => n)), (n) => n.toLocaleString("en"));
    explorer.querySelector("#client-figures").replaceChildren(...Object.entries(group.figures).flatMap(([metric, title]) => {
      const measured = group.methods.filter((m) => Object.keys(m.values[metric]).length); // Local has no global model
      const rows = measured.map((m) => [m.label, m.values[metric][client] ?? null, m.colour]).sort((a, b) => (b[1] ?? -1) - (a[1] ?? -1));
      const chart = element("div", undefined, "bars");
      chart.id = `client-${metric}`;
      bars(chart, rows, 100, (value) => value.toFixed(1));
      return [element("h3", title), chart];
    }));
    showHeld(group, client);
  };
  const sampleSays = (group, more) => {
    const place = explorer.querySelector("#client-sample"), here = group.clients.length;
    place.hidden = here === group.all;
    place.textContent = `${here.toLocaleString("en")} of ${group.all.toLocaleString("en")} are in this page, from the worst to the best served.${more}`;
  };
  const showGroup = () => {
    const group = data.explorer[pick.group.value];
    const many = group.clients.length > 12;
    for (const node of [find, explorer.querySelector("label[for=find-client]")]) node.hidden = !many;
    find.value = "";
    sampleSays(group, "");
    fill(pick.client, group.clients.map((i) => [i, name(group, i)]));
    showClient();
  };
  find.addEventListener("input", () => {
    const group = data.explorer[pick.group.value], sought = find.value.trim().toLowerCase(), now = pick.client.value;
    const all = group.clients.map((i) => [i, name(group, i)]);
    const some = all.filter(([, text]) => text.toLowerCase().includes(sought));
    fill(pick.client, some.length ? some : all);
    sampleSays(group, some.length ? "" : ` None of them is called “${sought}”.`);
    if (some.some(([i]) => String(i) === now)) pick.client.value = now;
    showClient();
  });
  fill(pick.group, data.explorer.map((group, i) => [i, group.label]));
  pick.group.addEventListener("change", showGroup);
  pick.client.addEventListener("change", showClient);
  for (const [id, step] of [["earlier", -1], ["later", 1]]) {
    explorer.querySelector(`#${id}`).addEventListener("click", () => {
      const count = pick.client.options.length;
      pick.client.selectedIndex = (pick.client.selectedIndex + step + count) % count;
      showClient();
    });
  }
  for (const link of $$("a[data-client]")) {
    link.addEventListener("click", () => {
      pick.group.value = link.dataset.group;
      showGroup();
      pick.client.value = link.dataset.client;
      showClient();
    });
  }
  explorer.hidden = false;
  showGroup();
})();
