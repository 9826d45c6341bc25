// Times llama.cpp: plain, and with a draft of up to n tokens; llama.py calls it.
// stdin: {target, draft, threads, new, gammas, prompts}; stdout: JSON.
import {createRequire} from 'node:module';
import {pathToFileURL} from 'node:url';
import {readFileSync} from 'node:fs';

const from = createRequire(process.cwd() + '/');
const {getLlama, getModuleVersion, DraftSequenceTokenPredictor} = await import(
  pathToFileURL(from.resolve('node-llama-cpp'))
);
const asked = JSON.parse(readFileSync(0, 'utf8'));
const llama = await getLlama({
  gpu: false, build: 'never', maxThreads: asked.threads, logLevel: 'error',
});
const size = Math.max(...asked.prompts.map((x) => x.length)) + asked.new + 16;
const open = async (path) =>
  (await llama.loadModel({modelPath: path})).createContext({
    contextSize: size, threads: asked.threads, sequences: 1,
  });

// Tokens a second after the first token.
async function time(sequence, prompt) {
  await sequence.clearHistory();
  let count = 0, first = 0, last = 0;
  for await (const token of sequence.evaluate(prompt, {
    temperature: 0, yieldEogToken: true,
  })) {
    last = performance.now();
    first ||= last;
    if (++count >= asked.new || sequence.model.isEogToken(token)) break;
  }
  return {tokens: count - 1, seconds: (last - first) / 1000};
}

const rows = [];
for (const gamma of [0, ...asked.gammas]) {
  const target = await open(asked.target);
  const draft = gamma ? await open(asked.draft) : null;
  const tokenPredictor = draft &&
    new DraftSequenceTokenPredictor(draft.getSequence(), {maxTokens: gamma});
  const sequence = target.getSequence({tokenPredictor});
  const timed = [];
  for (const prompt of asked.prompts) timed.push(await time(sequence, prompt));
  rows.push({gamma, timed});
  await target.dispose();
  await draft?.dispose();
}
const version = await getModuleVersion();
console.log(JSON.stringify({rows, version, cpu: llama.systemInfo}));
process.exit(0);
