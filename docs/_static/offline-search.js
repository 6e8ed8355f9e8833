// A browser reads no other file of a folder (file://), so the excerpts of search results come from excerpts.js.
if (window.location.protocol === "file:" && window.excerpts) {
  const fromNetwork = window.fetch;
  window.fetch = (address, ...options) => {
    const page = decodeURIComponent(String(address)).split("#")[0].split("/").pop().replace(/\.html$/, "");
    const text = window.excerpts[page];
    if (text === undefined) return fromNetwork(address, ...options);
    return Promise.resolve(new Response(`<div role="main">${text}</div>`));
  };
}
