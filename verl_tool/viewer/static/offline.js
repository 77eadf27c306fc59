// In a copy without a server: the server's answers, from files in data/. A classic script, before the others.

(() => {
  const { nonce } = document.currentScript;
  const known = {};
  globalThis.viewerData = (name, text) => { known[name] = JSON.parse(text); };
  const load = (name) => name in known ? known[name] : new Promise((done, fail) => {
    const script = document.createElement("script");
    Object.assign(script, { nonce, src: `data/${name}.js`, onload: () => done(known[name]), onerror: () => fail(new Error("this is not in the copy")) });
    document.head.append(script);
  });

  const WORDS = ["kind", "stop", "fault", "excluded"];
  const ofFiles = (rows, p) => rows.filter((row) => (!p.files || p.files.split(",").includes(row.file)) && (p.kind ? row.kind === p.kind : p.files || row.kind !== "branch"));
  function table(rows, p) {
    const bounds = Object.entries(p).filter(([name, value]) => /_(min|max)$/.test(name) && value !== "").map(([name, value]) => [name.slice(0, -4), name.endsWith("min"), Number(value)]);
    const found = ofFiles(rows, p).filter((row) => WORDS.every((name) => !p[name] || (p[name] === "(any)" ? row[name] : row[name] === p[name]))
      && (!p.tool || row.tools.split(",").includes(p.tool)) && (!p.prompt || row.prompt === Number(p.prompt))
      && bounds.every(([name, least, value]) => row[name] !== null && (least ? row[name] >= value : row[name] <= value))
      && (!p.text || `${row.question}\n${row.answer}`.toLowerCase().includes(p.text.toLowerCase())));
    const sign = p.desc === "1" ? -1 : 1;
    if (p.sort) found.sort((a, b) => a[p.sort] === b[p.sort] ? 0 : a[p.sort] === null ? 1 : b[p.sort] === null ? -1 : sign * (a[p.sort] < b[p.sort] ? -1 : 1));
    return found;
  }
  const count = (words) => words.reduce((counts, word) => ({ ...counts, [word]: (counts[word] || 0) + 1 }), {});
  const failed = (row) => row.fault !== "" || (row.correct === null ? row.failed_calls > 0 : row.correct < 0.5);
  const address = (row) => row && { file: row.file, line: row.line };

  const answers = {
    rows: (run, p) => {
      const found = table(run.rows, p);
      const offset = Number(p.offset || 0);
      return { total: found.length, searched: found.length, candidates: found.length, offset, rows: found.slice(offset, offset + Number(p.limit || 0)), missing_bytes: 0, rows_known: run.rows.length };
    },
    facets: (run, p) => {
      const rows = ofFiles(run.rows, p);
      const told = Object.fromEntries(WORDS.map((name) => [name, count(rows.map((row) => row[name]))]));
      return { ...told, files: run.files, tool: count(rows.flatMap((row) => row.tools ? row.tools.split(",") : [])), rewards: { counts: [], edges: [] }, failed: rows.filter((row) => row.failed_calls > 0).length, version: 1, missing_bytes: 0 };
    },
    group: (run, p) => {
      const own = run.rows.find((row) => row.file === p.file && row.line === Number(p.line));
      return { rows: run.rows.filter((row) => row.file === p.file && row.prompt === own.prompt) };
    },
    trajectory: async (run, p) => {
      const found = table(run.rows, p);
      const place = found.findIndex((row) => row.file === p.file && row.line === Number(p.line));
      const told = (await load(`${run.key}_${p.file}`))[p.line];
      const row = run.rows.find((one) => one.file === p.file && one.line === Number(p.line));
      return { row, record: told.record, trainer: told.trainer, branches: told.branches, values: told.values, place: place < 0 ? null : place, of: found.length, previous: address(found[place - 1]), next: place < 0 ? null : address(found[place + 1]), next_failure: place < 0 ? null : address(found.slice(place + 1).find(failed)) };
    },
    pieces: async (run, p) => (await load(`${run.key}_${p.file}`))[p.line].pieces,
    prompts: (run, p) => run.prompts[p.kind || "any"],
    metrics: (run) => run.metrics,
    config: (run) => run.config,
    by_file: (run) => run.by_file,
  };
  globalThis.viewerOffline = {
    get: async (name, params) => {
      const runs = await load("runs");
      if (name === "runs") return runs;
      if (name === "compare") {
        const told = await load(`compare_${params.run.split(",").map((one) => runs.find((run) => run.name === one)?.key).join("_")}`);
        if (told.error) throw new Error(told.error);
        return told;
      }
      const found = runs.find((run) => run.name === params.run);
      if (!found) throw new Error(`there is no run ${params.run} in this copy`);
      return answers[name](await load(found.key), params);
    },
    image: (sha256) => `images/${sha256}`,
  };
})();
