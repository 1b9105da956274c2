// An image whose patches are framed in the colour of what is proven about them.

function patchMap(picture, tokens, items, label) {
  const bytes = Uint8Array.from(atob(picture.pixels), letter => letter.charCodeAt(0));
  const chips = makeChips(tokens, items, row => (row ? patchFace(picture, bytes, row - 1) : "")).slice(1);
  const group = chipGroup("words patches", label, chips, chips, picture.side);
  group.style.setProperty("--columns", picture.side);
  return group;
}

// The pixels of one patch: bytes hold patch after patch, in each channel after channel.
function patchFace({ patch, channels }, bytes, index) {
  const size = patch * patch;
  const colours = new ImageData(patch, patch);
  for (let pixel = 0; pixel < size; pixel += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      const channel = channels === 3 ? colour : 0;
      colours.data[4 * pixel + colour] = bytes[(index * channels + channel) * size + pixel];
    }
    colours.data[4 * pixel + 3] = 255;
  }
  const canvas = element("canvas", { width: patch, height: patch });
  canvas.getContext("2d").putImageData(colours, 0, 0);
  return canvas;
}
