// What the theme leaves out for those who do not use a mouse or a screen.
// Its search is a dialog without a name; a screen reader needs one.
document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");

// What scrolls by itself, long outputs and wide tables, must be reached by the keyboard to be scrolled.
const reachable = () => {
  for (const part of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset .ledger")) {
    if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.tabIndex = 0;
  }
};
const article = document.querySelector("article");
if (article) {
  new ResizeObserver(reachable).observe(article);
  new MutationObserver(reachable).observe(article, { childList: true, subtree: true });
}
