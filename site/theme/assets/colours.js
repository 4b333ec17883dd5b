// Colours for the Python of notebook pages. Made here instead of in the page, the markup would be three times the code.
const KEYWORDS = "False None True and as assert async await break case class continue def del elif else except finally for from " +
  "global if import in is lambda match nonlocal not or pass raise return try while with yield";
const TOKEN = new RegExp([
  /(?<c1>#.*)/,
  /(?<s1>[rbfRBF]{0,2}(?:"""[^]*?"""|'''[^]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))/,
  /(?<=\b(?:def|class)\s+)(?<nf>\w+)/,
  /(?<nd>^[ \t]*@[\w.]+)/,
  new RegExp(`(?<k>\\b(?:${KEYWORDS.split(" ").join("|")})\\b)`),
  /(?<m>\b\d[\w.]*)/,
].map((part) => part.source).join("|"), "gm");

for (const code of document.querySelectorAll(".cell.highlight code")) {
  const text = code.textContent;
  const pieces = [];
  let done = 0;
  for (const match of text.matchAll(TOKEN)) {
    const [kind, token] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    const span = document.createElement("span");
    span.className = kind === "m" ? "mi" : kind;
    span.textContent = token;
    pieces.push(text.slice(done, match.index), span);
    done = match.index + token.length;
  }
  code.replaceChildren(...pieces, text.slice(done));
}
